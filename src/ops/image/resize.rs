//! Resizing of the last two axes.

use candle_core::{Device, Tensor};

use crate::{
    bail,
    error::Result,
    mil::{DType, Dim, Type},
    ops::{
        Args, BOOL, Call, DTypes, Eval, FLOAT, INT, Opset, Param, Preset, STRING, Spec, Tolerance, Val,
        args::named, fixed, from, linear::window::MOST, need, one, option, written,
    },
};

/// int32, fp32
const FACTOR: DTypes = DTypes::of(&[DType::I32, DType::F32]);

pub(super) static UPSAMPLE_NEAREST_NEIGHBOR: Spec = resize(
    "upsample_nearest_neighbor",
    &[
        need("x", FLOAT),
        written("scale_factor_height", FACTOR, Preset::Int(1)),
        written("scale_factor_width", FACTOR, Preset::Int(1)),
    ],
    scaled_type,
    |c| {
        let x = c.tensor("x")?;
        nearest(x, scaled(c, x)?)
    },
);

pub(super) static UPSAMPLE_BILINEAR: Spec = resize(
    "upsample_bilinear",
    &[
        need("x", FLOAT),
        written("scale_factor_height", FACTOR, Preset::Int(1)),
        written("scale_factor_width", FACTOR, Preset::Int(1)),
        written("align_corners", BOOL, Preset::Bool(true)),
        from(Opset::Ios16, option("half_pixel_centers", BOOL)),
    ],
    scaled_type,
    |c| {
        let x = c.tensor("x")?;
        let align = c.bool_or("align_corners", true)?;
        let mode = match (align, c.bool_or("half_pixel_centers", !align)?) {
            (true, _) => "STRICT_ALIGN_CORNERS",
            (false, true) => "UNALIGN_CORNERS",
            (false, false) => "DEFAULT",
        };
        bilinear(x, scaled(c, x)?, mode)
    },
);

pub(super) static RESIZE_NEAREST_NEIGHBOR: Spec = resize(
    "resize_nearest_neighbor",
    &[need("x", FLOAT), fixed("target_size_height", INT), fixed("target_size_width", INT)],
    target_type,
    |c| nearest(c.tensor("x")?, target(c)?),
);

pub(super) static RESIZE_BILINEAR: Spec = resize(
    "resize_bilinear",
    &[
        need("x", FLOAT),
        written("target_size_height", INT, Preset::Int(1)),
        written("target_size_width", INT, Preset::Int(1)),
        written("sampling_mode", STRING, Preset::Str("DEFAULT")),
    ],
    |a| {
        let mode = a.str_or("sampling_mode", "DEFAULT");
        if !MODES.contains(&mode) {
            bail!("`sampling_mode` is `{mode}`"; hint: "{} are possible", MODES.join(", "));
        }
        target_type(a)
    },
    |c| bilinear(c.tensor("x")?, target(c)?, c.str_or("sampling_mode", "DEFAULT")),
);

const MODES: [&str; 5] =
    ["STRICT_ALIGN_CORNERS", "ALIGN_CORNERS", "DEFAULT", "OFFSET_CORNERS", "UNALIGN_CORNERS"];

const fn resize(
    name: &'static str,
    params: &'static [Param],
    infer: fn(&Args<'_>) -> Result<Vec<Type>>,
    eval: fn(&Call<'_>) -> Result<Vec<Val>>,
) -> Spec {
    Spec {
        name,
        since: Opset::Ios15,
        params,
        infer,
        eval: Eval::Call(eval),
        flops: |a| a.out_count().saturating_mul(8),
        tolerance: Tolerance::Rounding,
    }
}

fn with_size(a: &Args<'_>, size: impl Fn(usize, Dim) -> Result<Dim>) -> Result<Vec<Type>> {
    let x = a.tensor("x")?;
    if x.rank() < 3 {
        bail!("{} has rank {}, at least 3 is expected", named("x", x), x.rank());
    }
    let mut dims = x.dims.clone();
    for (i, d) in dims.iter_mut().rev().take(2).enumerate() {
        *d = size(1 - i, *d)?;
    }
    Ok(vec![Type::tensor(x.dtype, dims)])
}

const FACTORS: [&str; 2] = ["scale_factor_height", "scale_factor_width"];
const TARGETS: [&str; 2] = ["target_size_height", "target_size_width"];

fn scaled_type(a: &Args<'_>) -> Result<Vec<Type>> {
    with_size(a, |i, d| match d {
        Dim::Fixed(n) => {
            Ok(Dim::Fixed(times(n, a.float(FACTORS[i])?.unwrap_or(1.0)).map_err(|e| e.at(FACTORS[i]))?))
        }
        unknown => Ok(unknown),
    })
}

fn target_type(a: &Args<'_>) -> Result<Vec<Type>> {
    with_size(a, |i, _| match a.int(TARGETS[i])? {
        Some(n) => Ok(Dim::Fixed(positive(n).map_err(|e| e.at(TARGETS[i]))?)),
        None if a.has(TARGETS[i]) => bail!("`{}` must be known when the program is compiled", TARGETS[i]),
        None => Ok(Dim::Fixed(1)),
    })
}

fn scaled(c: &Call<'_>, x: &Tensor) -> Result<[usize; 2]> {
    let [.., h, w] = x.dims() else { bail!("`x` has rank {}, at least 3 is expected", x.rank()) };
    Ok([times(*h, c.float_or(FACTORS[0], 1.0)?)?, times(*w, c.float_or(FACTORS[1], 1.0)?)?])
}

fn target(c: &Call<'_>) -> Result<[usize; 2]> {
    Ok([positive(c.int_or(TARGETS[0], 1)?)?, positive(c.int_or(TARGETS[1], 1)?)?])
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "checked before"
)]
fn times(n: usize, factor: f32) -> Result<usize> {
    let size = (n as f64 * f64::from(factor)).floor();
    if !(1.0..=f64::from(1 << 24)).contains(&size) {
        bail!("a size of {n} times {factor} is out of range");
    }
    Ok(size as usize)
}

fn positive(n: i64) -> Result<usize> {
    match usize::try_from(n) {
        Ok(n) if (1..=1 << 24).contains(&n) => Ok(n),
        _ => bail!("a size of {n} is out of range"),
    }
}

fn nearest(x: &Tensor, size: [usize; 2]) -> Result<Vec<Val>> {
    let [.., h, w] = x.dims() else { bail!("`x` has rank {}, at least 3 is expected", x.rank()) };
    let pick = |i: usize, from: usize, to: usize| i * from / to;
    let rows: Vec<usize> = (0..size[0]).map(|i| pick(i, *h, size[0])).collect();
    let columns: Vec<usize> = (0..size[1]).map(|i| pick(i, *w, size[1])).collect();
    sample(x, size, |image, y, x| image[rows[y] * w + columns[x]])
}

fn bilinear(x: &Tensor, size: [usize; 2], mode: &str) -> Result<Vec<Val>> {
    let [.., h, w] = x.dims() else { bail!("`x` has rank {}, at least 3 is expected", x.rank()) };
    let rows: Vec<Between> = (0..size[0]).map(|i| between(grid(mode, i, *h, size[0]), *h)).collect();
    let columns: Vec<Between> = (0..size[1]).map(|i| between(grid(mode, i, *w, size[1]), *w)).collect();
    sample(x, size, |image, y, x| {
        let ((y0, y1, fy), (x0, x1, fx)) = (rows[y], columns[x]);
        let line = |y: usize| image[y * w + x0] * (1.0 - fx) + image[y * w + x1] * fx;
        line(y0) * (1.0 - fy) + line(y1) * fy
    })
}

/// Where element `i` of `to` lies among `from` elements.
#[expect(clippy::cast_precision_loss, reason = "positions in an image")]
fn grid(mode: &str, i: usize, from: usize, to: usize) -> f64 {
    let (at, from, to) = (i as f64, from as f64, to as f64);
    match mode {
        "ALIGN_CORNERS" if to == 1.0 => (from - 1.0) / 2.0,
        "ALIGN_CORNERS" | "STRICT_ALIGN_CORNERS" => at * (from - 1.0) / (to - 1.0).max(1.0),
        "OFFSET_CORNERS" => (at + 0.5) * (from - 1.0).max(1.0) / to,
        "UNALIGN_CORNERS" => (at + 0.5) * from / to - 0.5,
        _ => at * from / to,
    }
}

/// Two neighbours, and the weight of the second.
type Between = (usize, usize, f32);

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "clamped to the image"
)]
fn between(at: f64, size: usize) -> Between {
    let last = size.saturating_sub(1);
    let at = at.clamp(0.0, last as f64);
    let low = at.floor() as usize;
    (low, (low + 1).min(last), (at - at.floor()) as f32)
}

fn sample(x: &Tensor, size: [usize; 2], f: impl Fn(&[f32], usize, usize) -> f32) -> Result<Vec<Val>> {
    let [outer @ .., h, w] = x.dims() else { bail!("`x` has rank {}, at least 3 is expected", x.rank()) };
    let images: usize = outer.iter().product();
    let mut shape = outer.to_vec();
    shape.extend(size);
    let total = size[0].checked_mul(size[1]).and_then(|n| n.checked_mul(images)).filter(|n| *n <= MOST);
    let Some(total) = total else { bail!("a result of {shape:?} is too large") };
    if h * w == 0 {
        bail!("an image of {h} by {w} cannot be resized");
    }
    let v: Vec<f32> = x.flatten_all()?.to_vec1()?;
    let mut out = Vec::with_capacity(total);
    for image in v.chunks(h * w) {
        for y in 0..size[0] {
            out.extend((0..size[1]).map(|x| f(image, y, x)));
        }
    }
    one(Tensor::from_vec(out, shape, &Device::Cpu)?)
}
