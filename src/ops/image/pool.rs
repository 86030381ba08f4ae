//! The largest, the mean or the length of what a window sees.

use candle_core::Device;

use crate::{
    bail,
    error::Result,
    mil::{Type, types::shape_text},
    ops::{
        Args, BOOL, Call, Eval, FLOAT, INT, Opset, Param, Preset, STRING, Spec, Tolerance, Val,
        args::named,
        fixed,
        linear::window::{MOST, Padding, Plan, Window, numbers},
        need, written,
    },
};

pub(super) static MAX_POOL: Spec = pool("max_pool", PARAMS, |c| {
    slide(c, f32::NEG_INFINITY, |m, v| if v > m || v.is_nan() { v } else { m }, |m, _| m)
});

pub(super) static L2_POOL: Spec =
    pool("l2_pool", PARAMS, |c| slide(c, 0.0, |s, v| s + v * v, |s, _| s.sqrt()));

pub(super) static AVG_POOL: Spec = pool(
    "avg_pool",
    &[
        need("x", FLOAT),
        fixed("kernel_sizes", INT),
        written("strides", INT, Preset::Caller),
        fixed("pad_type", STRING),
        written("pad", INT, Preset::Caller),
        written("exclude_padding_from_average", BOOL, Preset::Bool(false)),
        written("ceil_mode", BOOL, Preset::Bool(false)),
    ],
    |c| {
        let exclude = c.bool_or("exclude_padding_from_average", false)?;
        #[expect(clippy::cast_precision_loss, reason = "a count of taps")]
        slide(c, 0.0, |s, v| s + v, |s, seen| s / (if exclude { seen.0 } else { seen.1 }).max(1) as f32)
    },
);

const PARAMS: &[Param] = &[
    need("x", FLOAT),
    fixed("kernel_sizes", INT),
    written("strides", INT, Preset::Caller),
    fixed("pad_type", STRING),
    written("pad", INT, Preset::Caller),
    written("ceil_mode", BOOL, Preset::Bool(false)),
];

const fn pool(name: &'static str, params: &'static [Param], f: fn(&Call<'_>) -> Result<Vec<Val>>) -> Spec {
    Spec {
        name,
        since: Opset::Ios15,
        params,
        infer: |a| {
            let x = a.tensor("x")?;
            if !(3..=5).contains(&x.rank()) {
                bail!("{} has rank {}, 3 to 5 is expected", named("x", x), x.rank());
            }
            let Some(kernel) = a.ints("kernel_sizes")? else {
                bail!("`kernel_sizes` must be known when the program is compiled");
            };
            let mut window = Window::read(a, numbers(&kernel, "kernel_sizes", x.rank() - 2)?)?;
            window.ceil = a.bool_or("ceil_mode", false)?;
            check_ceil(&window)?;
            let mut dims = x.dims[..2].to_vec();
            dims.extend(window.spatial(&x.dims[2..]).map_err(|e| e.at(named("x", x)))?);
            Ok(vec![Type::tensor(x.dtype, dims)])
        },
        eval: Eval::Call(f),
        flops: taps,
        tolerance: Tolerance::Rounding,
    }
}

fn taps(a: &Args<'_>) -> u64 {
    let kernel = a.ints("kernel_sizes").ok().flatten().unwrap_or_default();
    kernel.iter().fold(a.out_count(), |n, k| n.saturating_mul(k.unsigned_abs()))
}

fn check_ceil(w: &Window) -> Result<()> {
    match &w.padding {
        _ if !w.ceil => Ok(()),
        _ if w.kernel.len() > 2 => {
            bail!("`ceil_mode` is possible on one or two axes, the kernel is {}", shape_text(&w.kernel))
        }
        Padding::Custom(pads) if pads.iter().any(|(a, b)| a != b) => {
            bail!("`ceil_mode` wants as much padding before an axis as after it")
        }
        Padding::Same { .. } => bail!("`ceil_mode` and `pad_type` same exclude each other"),
        _ => Ok(()),
    }
}

/// Folds what each window sees; `end` also gets how many elements that were, and how many with padding.
fn slide(
    c: &Call<'_>,
    start: f32,
    add: impl Fn(f32, f32) -> f32,
    end: impl Fn(f32, (usize, usize)) -> f32,
) -> Result<Vec<Val>> {
    let x = c.tensor("x")?;
    if !(3..=5).contains(&x.rank()) {
        bail!("`x` has rank {}, 3 to 5 is expected", x.rank());
    }
    let sizes = &x.dims()[2..];
    let mut window = Window::read(c, numbers(&c.ints("kernel_sizes")?, "kernel_sizes", sizes.len())?)?;
    window.ceil = c.bool_or("ceil_mode", false)?;
    check_ceil(&window)?;
    let plan = window.plan(sizes)?;
    let mut shape = x.dims()[..2].to_vec();
    shape.extend(&plan.out[5 - x.rank()..]);
    let (image, result) = (plan.size.iter().product::<usize>(), plan.lines() * plan.out[2]);
    let images = x.dims()[0] * x.dims()[1];
    let Some(total) = images.checked_mul(result).filter(|n| *n <= MOST) else {
        bail!("a result of {} is too large", shape_text(&shape));
    };
    let (seen, padded) = (counts(&plan, plan.size, [0; 3]), padded_counts(&window, &plan, sizes)?);
    let v: Vec<f32> = x.flatten_all()?.to_vec1()?;
    let mut y = vec![start; total];
    for n in 0..images {
        let (x, y) = (&v[n * image..(n + 1) * image], &mut y[n * result..(n + 1) * result]);
        for tap in 0..plan.taps() {
            plan.each(tap, 0..plan.lines(), |to, from| y[to] = add(y[to], x[from]));
        }
        for (i, y) in y.iter_mut().enumerate() {
            *y = end(*y, (seen[i], padded[i]));
        }
    }
    Ok(vec![candle_core::Tensor::from_vec(y, shape, &Device::Cpu)?.into()])
}

/// How many taps of each window fall inside an extent that starts `lead` elements before the input.
fn counts(plan: &Plan, size: [usize; 3], lead: [usize; 3]) -> Vec<usize> {
    let along = |axis: usize| {
        let first = plan.before[axis] - lead[axis].min(plan.before[axis]);
        let inside = |o: usize, k: usize| {
            let at = o * plan.stride[axis] + k * plan.dilation[axis];
            at >= first && at - first < size[axis]
        };
        (0..plan.out[axis])
            .map(|o| (0..plan.kernel[axis]).filter(|k| inside(o, *k)).count())
            .collect::<Vec<_>>()
    };
    let [z, y, x] = [along(0), along(1), along(2)];
    let mut all = Vec::with_capacity(z.len() * y.len() * x.len());
    for z in &z {
        for y in &y {
            all.extend(x.iter().map(|x| x * y * z));
        }
    }
    all
}

fn padded_counts(window: &Window, plan: &Plan, sizes: &[usize]) -> Result<Vec<usize>> {
    let mut size = plan.size;
    for (i, n) in sizes.iter().enumerate() {
        let (before, after) = window.pads(i, *n)?;
        size[3 - sizes.len() + i] = n.saturating_add(before).saturating_add(after);
    }
    Ok(counts(plan, size, plan.before))
}
