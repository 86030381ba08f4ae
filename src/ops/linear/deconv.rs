//! Transposed convolution: every input element adds a weighted kernel to the result.

use candle_core::{Device, Tensor};

use super::{
    conv::{add_bias, check_bias, groups},
    product,
    window::{MOST, Padding, Plan, Window, numbers},
};
use crate::{
    bail,
    error::Result,
    mil::{Dim, Type, types::shape_text},
    ops::{
        Eval, FLOAT, INT, Opset, Preset, STRING, Spec, Tolerance, args::named, need, one, option, written,
    },
};

pub(super) static CONV_TRANSPOSE: Spec = Spec {
    name: "conv_transpose",
    since: Opset::Ios15,
    params: &[
        need("x", FLOAT),
        need("weight", FLOAT),
        option("bias", FLOAT),
        written("pad", INT, Preset::Caller),
        option("output_shape", INT),
        written("pad_type", STRING, Preset::Str("valid")),
        written("strides", INT, Preset::Caller),
        written("dilations", INT, Preset::Caller),
        written("groups", INT, Preset::Int(1)),
    ],
    infer: |a| {
        let (x, w) = (a.tensor("x")?, a.tensor("weight")?);
        if !(3..=5).contains(&x.rank()) || x.rank() != w.rank() {
            bail!("{} and {} have no matching ranks of 3 to 5", named("x", x), named("weight", w));
        }
        if !x.dims[1].agrees(w.dims[0]) {
            bail!("{} has {} channels, {} takes {}", named("x", x), x.dims[1], named("weight", w), w.dims[0]);
        }
        let groups = groups(a.int_or("groups", 1)?)?;
        if w.dims[0].fixed().is_some_and(|n| n % groups != 0) {
            bail!("{} does not divide into {groups} groups", named("weight", w));
        }
        let out = w.dims[1].fixed().map_or(Dim::ANY, |n| Dim::Fixed(n.saturating_mul(groups)));
        check_bias(a, w, out)?;
        let Some(kernel) = w.dims[2..].iter().map(|d| d.fixed()).collect::<Option<Vec<_>>>() else {
            bail!("{} has an unknown kernel size", named("weight", w));
        };
        let window = Window::read(a, kernel)?;
        let wanted = wanted(a.ints("output_shape")?, x.rank())?;
        let mut dims = vec![x.dims[0], out];
        for (i, d) in x.dims[2..].iter().enumerate() {
            let wanted = wanted.as_ref().map(|w| w[i + 2]);
            dims.push(match (d, wanted) {
                (Dim::Fixed(n), _) => Dim::Fixed(extent(&window, i, *n, wanted)?.0),
                (_, Some(n)) => Dim::Fixed(n),
                (unknown, None) => *unknown,
            });
        }
        if wanted.is_some_and(|w| !dims[..2].iter().zip(w).all(|(d, n)| d.agrees(Dim::Fixed(n)))) {
            bail!("the result is {}, `output_shape` has another batch or channel count", shape_text(&dims));
        }
        Ok(vec![Type::tensor(x.dtype, dims)])
    },
    eval: Eval::Call(|c| {
        let (x, w) = (c.tensor("x")?, c.tensor("weight")?);
        if !(3..=5).contains(&x.rank()) || x.rank() != w.rank() {
            bail!("x of rank {} and weight of rank {} do not match", x.rank(), w.rank());
        }
        let groups = groups(c.int_or("groups", 1)?)?;
        if x.dims()[1] != w.dims()[0] || w.dims()[0] % groups != 0 {
            bail!("{} channels do not fit weight {:?} in {groups} groups", x.dims()[1], w.dims());
        }
        let window = Window::read(c, w.dims()[2..].to_vec())?;
        let shape = if c.has("output_shape") { Some(c.ints("output_shape")?) } else { None };
        let wanted = wanted(shape, x.rank())?;
        one(add_bias(spread(x, w, &window, groups, wanted.as_deref())?, c.maybe("bias"))?)
    }),
    flops: |a| {
        let each =
            a.dims("weight").map_or(1, |d| d[1..].iter().map(|n| n.fixed().unwrap_or(1) as u64).product());
        a.count("x").saturating_mul(2).saturating_mul(each)
    },
    tolerance: Tolerance::Rounding,
};

fn wanted(shape: Option<Vec<i64>>, rank: usize) -> Result<Option<Vec<usize>>> {
    shape.map(|s| numbers(&s, "output_shape", rank)).transpose()
}

/// Size of the result along spatial axis `i`, and how much is cut off in front of it.
fn extent(window: &Window, i: usize, size: usize, wanted: Option<usize>) -> Result<(usize, usize)> {
    let stride = window.strides[i];
    let reach = window.reach(i)?;
    let full = size.saturating_sub(1).checked_mul(stride).and_then(|n| n.checked_add(reach));
    let Some(full) = full else { bail!("axis {} of the result is too large", i + 2) };
    Ok(match &window.padding {
        Padding::Valid => (wanted.unwrap_or(full), 0),
        Padding::Custom(pads) => {
            let (before, after) = pads[i];
            let Some(left) = full.checked_sub(before).and_then(|n| n.checked_sub(after)) else {
                bail!("`pad` takes {before} and {after} from axis {}, which has {full}", i + 2);
            };
            (wanted.unwrap_or(left), before)
        }
        Padding::Same { lower } => {
            let out = wanted.unwrap_or(size.saturating_mul(stride));
            let cut = full.saturating_sub(out);
            (out, if *lower { cut - cut / 2 } else { cut / 2 })
        }
    })
}

fn spread(
    x: &Tensor,
    w: &Tensor,
    window: &Window,
    groups: usize,
    wanted: Option<&[usize]>,
) -> Result<Tensor> {
    let (batch, channels, each) = (x.dims()[0], x.dims()[1], w.dims()[1]);
    let sizes = &x.dims()[2..];
    let extents = (0..sizes.len())
        .map(|i| extent(window, i, sizes[i], wanted.map(|w| w[i + 2])))
        .collect::<Result<Vec<_>>>()?;
    let (outs, before): (Vec<usize>, Vec<usize>) = extents.into_iter().unzip();
    // The roles are swapped: the result is read by windows whose positions are the input's elements.
    let plan = Plan::new(window, &outs, sizes, &before)?;
    let (taps, positions) = (plan.taps(), sizes.iter().product::<usize>());
    let mut shape = vec![batch, each.saturating_mul(groups)];
    shape.extend(&outs);
    let Some(total) = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).filter(|n| *n <= MOST) else {
        bail!("a result of {} is too large", shape_text(&shape));
    };
    let mut y = vec![0f32; total];
    let image = outs.iter().product::<usize>();
    if total == 0 || positions == 0 || channels == 0 {
        return Ok(Tensor::from_vec(y, shape, &Device::Cpu)?);
    }
    let w =
        w.contiguous()?.reshape((groups, channels / groups, each * taps))?.transpose(1, 2)?.contiguous()?;
    let x = x.contiguous()?.reshape((batch, groups, channels / groups, positions))?;
    for (b, y) in y.chunks_mut(image * each * groups).enumerate() {
        let columns: Vec<f32> = product(&w, &x.get(b)?)?.flatten_all()?.to_vec1()?;
        for (row, column) in columns.chunks(positions).enumerate() {
            let y = &mut y[row / taps * image..][..image];
            plan.each(row % taps, 0..plan.lines(), |from, to| y[to] += column[from]);
        }
    }
    Ok(Tensor::from_vec(y, shape, &Device::Cpu)?)
}
