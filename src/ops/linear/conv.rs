//! Convolutions: matrix products over gathered windows.

use candle_core::{Device, Tensor};

use super::{
    product,
    window::{Plan, Window},
};
use crate::{
    bail,
    error::Result,
    mil::{Dim, TensorType, Type},
    ops::{
        Args, Eval, FLOAT, INT, Opset, Preset, STRING, Spec, Tolerance, args::named, maybe, need, one,
        written,
    },
};

pub(super) static CONV: Spec = Spec {
    name: "conv",
    since: Opset::Ios15,
    params: &[
        need("x", FLOAT),
        need("weight", FLOAT),
        maybe("bias", FLOAT),
        written("strides", INT, Preset::Caller),
        written("pad_type", STRING, Preset::Str("valid")),
        written("pad", INT, Preset::Caller),
        written("dilations", INT, Preset::Caller),
        written("groups", INT, Preset::Int(1)),
    ],
    infer: |a| {
        let (x, w) = (a.tensor("x")?, a.tensor("weight")?);
        if !(3..=5).contains(&x.rank()) || x.rank() != w.rank() {
            bail!("{} and {} have no matching ranks of 3 to 5", named("x", x), named("weight", w));
        }
        let groups = groups(a.int_or("groups", 1)?)?;
        let taken = w.dims[1].fixed().map_or(Dim::ANY, |n| Dim::Fixed(n.saturating_mul(groups)));
        if !x.dims[1].agrees(taken) {
            let of = if groups == 1 { String::new() } else { format!(" in {groups} groups") };
            bail!("{} has {} channels, {} takes {taken}{of}", named("x", x), x.dims[1], named("weight", w));
        }
        let out = w.dims[0];
        if out.fixed().is_some_and(|n| n % groups != 0) {
            bail!("{} does not divide into {groups} groups", named("weight", w));
        }
        check_bias(a, w, out)?;
        let Some(kernel) = w.dims[2..].iter().map(|d| d.fixed()).collect::<Option<Vec<_>>>() else {
            bail!("{} has an unknown kernel size", named("weight", w));
        };
        let mut dims = vec![x.dims[0], out];
        dims.extend(Window::read(a, kernel)?.spatial(&x.dims[2..]).map_err(|e| e.at(named("x", x)))?);
        Ok(vec![Type::tensor(x.dtype, dims)])
    },
    eval: Eval::Call(|c| {
        let (x, w) = (c.tensor("x")?, c.tensor("weight")?);
        if !(3..=5).contains(&x.rank()) || x.rank() != w.rank() {
            bail!("x of rank {} and weight of rank {} do not match", x.rank(), w.rank());
        }
        let groups = groups(c.int_or("groups", 1)?)?;
        if x.dims()[1] != w.dims()[1].saturating_mul(groups) || w.dims()[0] % groups != 0 {
            bail!("{} channels do not fit weight {:?} in {groups} groups", x.dims()[1], w.dims());
        }
        let y = convolve(x, w, &Window::read(c, w.dims()[2..].to_vec())?, groups)?;
        one(add_bias(y, c.maybe("bias"))?)
    }),
    flops: |a| {
        let per =
            a.dims("weight").map_or(1, |d| d[1..].iter().map(|n| n.fixed().unwrap_or(1) as u64).product());
        a.out_count().saturating_mul(2).saturating_mul(per)
    },
    tolerance: Tolerance::Rounding,
};

fn groups(n: i64) -> Result<usize> {
    match usize::try_from(n) {
        Ok(n) if n > 0 => Ok(n),
        _ => bail!("`groups` is {n}, at least 1 is expected"),
    }
}

fn check_bias(a: &Args<'_>, w: &TensorType, out: Dim) -> Result<()> {
    if a.has("bias") {
        let b = a.tensor("bias")?;
        if b.rank() != 1 || !b.dims[0].agrees(out) {
            bail!("{} gives {out} channels, {} does not fit", named("weight", w), named("bias", b));
        }
    }
    Ok(())
}

fn add_bias(y: Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let Some(bias) = bias else { return Ok(y) };
    let mut shape = vec![1; y.rank()];
    shape[1] = y.dims()[1];
    Ok(y.broadcast_add(&bias.reshape(shape)?)?)
}

fn convolve(x: &Tensor, w: &Tensor, window: &Window, groups: usize) -> Result<Tensor> {
    let (batch, channels, out) = (x.dims()[0], x.dims()[1], w.dims()[0]);
    let plan = window.plan(&x.dims()[2..])?;
    let mut shape = vec![batch, out];
    shape.extend(&plan.out[5 - x.rank()..]);
    let input: usize = plan.size.iter().product();
    let pointwise =
        plan.taps() == 1 && plan.stride == [1; 3] && plan.out == plan.size && plan.before == [0; 3];
    let x = x.contiguous()?.reshape((batch, channels, input))?;
    if pointwise && groups == 1 {
        let w = w.reshape((out, channels))?;
        let each = (0..batch).map(|b| product(&w, &x.get(b)?)).collect::<Result<Vec<_>>>()?;
        return Ok(Tensor::stack(&each, 0)?.reshape(shape)?);
    }
    let w = w.contiguous()?.reshape((groups, out / groups, channels / groups * plan.taps()))?;
    let mut each = Vec::with_capacity(batch);
    for b in 0..batch {
        let columns = gather(&x.get(b)?.flatten_all()?.to_vec1()?, channels, &plan)?;
        let columns = columns.reshape((groups, channels / groups * plan.taps(), plan.positions()))?;
        each.push(product(&w, &columns)?);
    }
    Ok(Tensor::stack(&each, 0)?.reshape(shape)?)
}

/// `[channels · taps, positions]`: what each tap reads of each channel at each position.
fn gather(x: &[f32], channels: usize, plan: &Plan) -> Result<Tensor> {
    let (taps, positions) = (plan.taps(), plan.positions());
    let input: usize = plan.size.iter().product();
    let Some(count) =
        channels.checked_mul(taps).and_then(|n| n.checked_mul(positions)).filter(|n| *n < 1 << 32)
    else {
        bail!("a convolution of {channels} channels, {taps} taps and {positions} positions is too large");
    };
    let mut columns = vec![0f32; count];
    for channel in 0..channels {
        let image = &x[channel * input..(channel + 1) * input];
        for tap in 0..taps {
            let start = (channel * taps + tap) * positions;
            let row = &mut columns[start..start + positions];
            plan.rows(tap, |to, from| row[to] = image[from]);
        }
    }
    Ok(Tensor::from_vec(columns, (channels * taps, positions), &Device::Cpu)?)
}
