//! The two products that Core ML's `einsum` is: `nchw,nwhu->nchu`, and the same without `n`.

use candle_core::Tensor;

use super::product;
use crate::{
    bail,
    error::Result,
    mil::{Dim, TensorType},
    ops::{args::named, broadcast},
};

const FORMS: [&str; 2] = ["nchw,nwhu->nchu", "chw,whu->chu"];

/// Refuses every other equation, whatever letters it is written in.
pub(super) fn supported(equation: &str) -> Result<()> {
    let text: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    if FORMS.into_iter().any(|form| same_form(form, &text)) {
        return Ok(());
    }
    bail!(
        "`equation` is `{equation}`, Core ML has `{}` and `{}` in any letters", FORMS[0], FORMS[1];
        hint: "swap the operands, or write it with `matmul`"
    )
}

/// Whether one text turns into the other when letters are renamed.
fn same_form(form: &str, text: &str) -> bool {
    let mut names: Vec<(char, char)> = Vec::new();
    form.len() == text.len()
        && form.chars().zip(text.chars()).all(|(f, t)| {
            if !f.is_ascii_alphabetic() || !t.is_ascii_alphabetic() {
                return f == t;
            }
            match names.iter().find(|(a, b)| *a == f || *b == t) {
                Some(known) => *known == (f, t),
                None => {
                    names.push((f, t));
                    true
                }
            }
        })
}

/// `[…, C, H, W]` and `[…, W, H, U]` give `[…, C, H, U]`; all but C, W and U broadcast.
pub(super) fn infer(x: &TensorType, y: &TensorType) -> Result<Vec<Dim>> {
    let fits = || {
        let ([n @ .., c, h, w], [m @ .., v, g, u]) = (x.dims.as_slice(), y.dims.as_slice()) else {
            return None;
        };
        let (batch, h) = (broadcast(n, m)?, broadcast(&[*h], &[*g])?);
        let rank = (3..=4).contains(&x.rank()) && x.rank() == y.rank();
        (rank && w.agrees(*v)).then(|| [batch, vec![*c], h, vec![*u]].concat())
    };
    match fits() {
        Some(dims) => Ok(dims),
        None => bail!("{} and {} do not fit the equation", named("values", x), named("values", y)),
    }
}

/// Multiplications and additions; unknown sizes count as one.
pub(super) fn work(x: &TensorType, y: &TensorType) -> u64 {
    let w = x.dims.last().and_then(|d| d.fixed()).unwrap_or(1) as u64;
    let out = infer(x, y).unwrap_or_default();
    out.iter().map(|d| d.fixed().unwrap_or(1) as u64).fold(2, u64::saturating_mul).saturating_mul(w)
}

/// One matrix product per n and h.
pub(super) fn eval(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let rank = x.rank();
    if !(3..=4).contains(&rank) || y.rank() != rank {
        bail!("operands of rank {rank} and {} do not fit the equation", y.rank());
    }
    let (x, y) = (x.transpose(rank - 3, rank - 2)?, y.transpose(rank - 3, rank - 2)?);
    Ok(product(&x, &y)?.transpose(rank - 3, rank - 2)?.contiguous()?)
}
