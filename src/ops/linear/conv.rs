//! Convolutions: matrix products over gathered windows.

use std::ops::Range;

use candle_core::{Device, Tensor};

use super::{
    product,
    window::{MOST, Plan, Window},
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

pub(super) fn groups(n: i64) -> Result<usize> {
    match usize::try_from(n) {
        Ok(n) if n > 0 => Ok(n),
        _ => bail!("`groups` is {n}, at least 1 is expected"),
    }
}

pub(super) fn check_bias(a: &Args<'_>, w: &TensorType, out: Dim) -> Result<()> {
    if a.has("bias") {
        let b = a.tensor("bias")?;
        if b.rank() != 1 || !b.dims[0].agrees(out) {
            bail!("{} gives {out} channels, {} does not fit", named("weight", w), named("bias", b));
        }
    }
    Ok(())
}

pub(super) fn add_bias(y: Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
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
    if shape.contains(&0) || channels == 0 {
        return Ok(Tensor::zeros(shape, x.dtype(), x.device())?);
    }
    let input: usize = plan.size.iter().product();
    let pointwise =
        plan.taps() == 1 && plan.stride == [1; 3] && plan.out == plan.size && plan.before == [0; 3];
    let x = x.contiguous()?.reshape((batch, channels, input))?;
    let each = if pointwise && groups == 1 {
        let w = w.contiguous()?.reshape((out, channels))?;
        (0..batch).map(|b| product(&w, &x.get(b)?)).collect::<Result<Vec<_>>>()?
    } else if channels == groups {
        let w: Vec<f32> = w.flatten_all()?.to_vec1()?;
        (0..batch).map(|b| depthwise(&x.get(b)?, &w, out / groups, &plan)).collect::<Result<Vec<_>>>()?
    } else {
        let w = w.contiguous()?.reshape((groups, out / groups, channels / groups * plan.taps()))?;
        (0..batch).map(|b| windows(&x.get(b)?, &w, channels, &plan)).collect::<Result<Vec<_>>>()?
    };
    Ok(Tensor::stack(&each, 0)?.reshape(shape)?)
}

/// One image, every channel by itself: each tap adds its part of the image.
fn depthwise(x: &Tensor, w: &[f32], each: usize, plan: &Plan) -> Result<Tensor> {
    let (input, positions, taps) =
        (plan.size.iter().product::<usize>(), plan.lines() * plan.out[2], plan.taps());
    let x: Vec<f32> = x.flatten_all()?.to_vec1()?;
    let out = w.len() / taps;
    let Some(count) = out.checked_mul(positions).filter(|n| *n <= MOST) else {
        bail!("a convolution of {out} channels and {positions} positions is too large");
    };
    let mut y = vec![0f32; count];
    for (n, row) in y.chunks_mut(positions).enumerate() {
        let image = &x[n / each * input..][..input];
        for tap in 0..taps {
            let weight = w[n * taps + tap];
            plan.each(tap, 0..plan.lines(), |to, from| row[to] += weight * image[from]);
        }
    }
    Ok(Tensor::from_vec(y, (out, positions), &Device::Cpu)?)
}

/// One image: a matrix product for as many lines at a time as fit a bounded buffer.
fn windows(x: &Tensor, w: &Tensor, channels: usize, plan: &Plan) -> Result<Tensor> {
    const BUFFER: usize = 1 << 24;
    let x: Vec<f32> = x.flatten_all()?.to_vec1()?;
    let groups = w.dims()[0];
    let Some(height) = channels.checked_mul(plan.taps()) else {
        bail!("{channels} channels and {} taps are too many", plan.taps());
    };
    let step = (BUFFER / height.saturating_mul(plan.out[2]).max(1)).max(1);
    let mut parts = Vec::new();
    for line in (0..plan.lines()).step_by(step) {
        let lines = line..(line + step).min(plan.lines());
        let columns = gather(&x, channels, plan, lines)?;
        let width = columns.dims()[1];
        parts.push(product(w, &columns.reshape((groups, height / groups, width))?)?);
    }
    Ok(Tensor::cat(&parts, 2)?)
}

/// `[channels · taps, positions]`: what each tap reads of each channel at each position of the lines.
fn gather(x: &[f32], channels: usize, plan: &Plan, lines: Range<usize>) -> Result<Tensor> {
    let (taps, start, width) = (plan.taps(), lines.start * plan.out[2], lines.len() * plan.out[2]);
    let input: usize = plan.size.iter().product();
    let Some(count) = (channels * taps).checked_mul(width).filter(|n| *n <= MOST) else {
        bail!("a convolution of {channels} channels, {taps} taps and {width} positions a line is too large");
    };
    let mut columns = vec![0f32; count];
    for channel in 0..channels {
        let image = &x[channel * input..(channel + 1) * input];
        for tap in 0..taps {
            let row = &mut columns[(channel * taps + tap) * width..][..width];
            plan.each(tap, lines.clone(), |to, from| row[to - start] = image[from]);
        }
    }
    Ok(Tensor::from_vec(columns, (channels * taps, width), &Device::Cpu)?)
}
