//! Moving elements between channels and image: reshape, permute, reshape.

use candle_core::Tensor;

use crate::{
    bail,
    error::Result,
    mil::{DType, Dim, Type},
    ops::{
        Args, Call, DTypes, Eval, FLOAT, INT, Opset, Param, Spec, Tolerance, Val, args::named, fixed, from,
        need, one,
    },
};

pub(super) static PIXEL_SHUFFLE: Spec = shuffle(
    "pixel_shuffle",
    &[need("x", FLOAT), fixed("upscale_factor", INT)],
    |a| grown(a, "upscale_factor"),
    |c| grow(c, "upscale_factor", true),
);

pub(super) static DEPTH_TO_SPACE: Spec = shuffle(
    "depth_to_space",
    &[need("x", FLOAT), fixed("block_size", INT)],
    |a| grown(a, "block_size"),
    |c| grow(c, "block_size", false),
);

pub(super) static PIXEL_UNSHUFFLE: Spec = Spec {
    since: Opset::Ios16,
    ..shuffle(
        "pixel_unshuffle",
        &[need("x", FLOAT), from(Opset::Ios16, fixed("downscale_factor", DTypes::of(&[DType::U32])))],
        |a| shrunk(a, "downscale_factor"),
        |c| shrink(c, "downscale_factor", true),
    )
};

pub(super) static SPACE_TO_DEPTH: Spec = shuffle(
    "space_to_depth",
    &[need("x", FLOAT), fixed("block_size", INT)],
    |a| shrunk(a, "block_size"),
    |c| shrink(c, "block_size", false),
);

const fn shuffle(
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
        flops: |_| 0,
        tolerance: Tolerance::Exact,
    }
}

/// Channels become `f` by `f` blocks of the image.
fn grown(a: &Args<'_>, factor: &str) -> Result<Vec<Type>> {
    let ([n, c, h, w], f) = (sizes(a)?, block(a.int(factor)?, factor)?);
    Ok(vec![Type::tensor(a.dtype("x")?, [n, part(a, c, f * f)?, whole(h, f), whole(w, f)])])
}

/// The way back.
fn shrunk(a: &Args<'_>, factor: &str) -> Result<Vec<Type>> {
    let ([n, c, h, w], f) = (sizes(a)?, block(a.int(factor)?, factor)?);
    Ok(vec![Type::tensor(a.dtype("x")?, [n, whole(c, f * f), part(a, h, f)?, part(a, w, f)?])])
}

fn sizes(a: &Args<'_>) -> Result<[Dim; 4]> {
    let x = a.tensor("x")?;
    match x.dims.as_slice() {
        [n, c, h, w] => Ok([*n, *c, *h, *w]),
        _ => bail!("{} has rank {}, 4 is expected", named("x", x), x.rank()),
    }
}

fn block(n: Option<i64>, name: &str) -> Result<usize> {
    match n.and_then(|n| usize::try_from(n).ok()) {
        Some(n) if (1..1 << 16).contains(&n) => Ok(n),
        _ => bail!("`{name}` is not a known number from 1 on"),
    }
}

fn part(a: &Args<'_>, d: Dim, by: usize) -> Result<Dim> {
    match d.fixed() {
        Some(n) if n % by != 0 => bail!("{}: {n} does not divide by {by}", named("x", a.tensor("x")?)),
        Some(n) => Ok(Dim::Fixed(n / by)),
        None => Ok(d),
    }
}

fn whole(d: Dim, by: usize) -> Dim {
    d.fixed().map_or(d, |n| Dim::Fixed(n.saturating_mul(by)))
}

/// `inner` says whether a channel's block lies beside it, or blocks come first and channels inside them.
fn grow(c: &Call<'_>, factor: &str, inner: bool) -> Result<Vec<Val>> {
    let (x, [n, ch, h, w], f) = image(c, factor)?;
    if ch % (f * f) != 0 {
        bail!("{ch} channels do not divide by {}", f * f);
    }
    let ch = ch / f / f;
    let x = if inner {
        x.reshape(vec![n, ch, f, f, h, w])?.permute(vec![0, 1, 4, 2, 5, 3])?
    } else {
        x.reshape(vec![n, f, f, ch, h, w])?.permute(vec![0, 3, 4, 1, 5, 2])?
    };
    one(x.contiguous()?.reshape((n, ch, h * f, w * f))?)
}

fn shrink(c: &Call<'_>, factor: &str, inner: bool) -> Result<Vec<Val>> {
    let (x, [n, ch, h, w], f) = image(c, factor)?;
    if h % f != 0 || w % f != 0 {
        bail!("an image of {h} by {w} does not divide by {f}");
    }
    let x = x.reshape(vec![n, ch, h / f, f, w / f, f])?;
    let x = if inner { x.permute(vec![0, 1, 3, 5, 2, 4])? } else { x.permute(vec![0, 3, 5, 1, 2, 4])? };
    one(x.contiguous()?.reshape((n, ch * f * f, h / f, w / f))?)
}

fn image(c: &Call<'_>, factor: &str) -> Result<(Tensor, [usize; 4], usize)> {
    let x = c.tensor("x")?.contiguous()?;
    let (n, ch, h, w) = x.dims4()?;
    Ok((x, [n, ch, h, w], block(Some(c.int_or(factor, 0)?), factor)?))
}
