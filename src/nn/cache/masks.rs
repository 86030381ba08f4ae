//! What depends on positions alone, made once per function: rotary rows, masks, biases by distance.

use super::{Heads, size};
use crate::{
    error::Result,
    graph::In,
    mil::{Const, DType, Literal, TensorType, ValueId},
    nn::{Net, attention::BLOCKED, rotary::Rope},
};

/// 0, 1, 2 … as int32.
pub(super) fn iota(n: usize, shape: &[usize]) -> In {
    let values = (0..size(n)).collect();
    Const::literal(TensorType::new(DType::I32, shape.iter().copied()), Literal::Ints(values)).into()
}

/// Rotary factors of the function's positions, `[1, D, 1, T]` each.
pub(super) fn rotation(
    n: &mut Net<'_>,
    rope: &Rope,
    dim: usize,
    context: usize,
    kind: usize,
    position_ids: ValueId,
) -> Result<(ValueId, ValueId)> {
    let key = format!("rotary rows {rope:?}");
    let table = n.constant_later(&key, &[context, 2 * dim], {
        let rope = rope.clone();
        move || rope.rows(context, dim)
    });
    let rows = n.lookup_in(&format!("rotary_{kind}"), table, position_ids)?;
    let columns = n.op(
        "transpose",
        &format!("rotary_{kind}_columns"),
        [("x", rows.into()), ("perm", [0, 2, 1].into())],
    )?;
    let columns = n.reshape(&format!("rotary_{kind}_table"), columns, &[1, 2 * dim, 1, n.tokens])?;
    let parts = n.split_channels(&format!("rotary_{kind}_factors"), columns, 1, 2)?;
    Ok((parts[0], parts[1]))
}

/// 0 where a query may look, [`BLOCKED`] elsewhere.
pub(super) fn mask(
    n: &mut Net<'_>,
    context: usize,
    kind: usize,
    position_ids: ValueId,
    window: Option<usize>,
) -> Result<ValueId> {
    let (slots, row) = if n.tokens == 1 {
        ([1, 1, 1, context], [1, 1, 1, 1])
    } else {
        ([1, 1, context, 1], [1, 1, 1, n.tokens])
    };
    let at = n.reshape(&format!("mask_{kind}_positions"), position_ids, &row)?;
    let mut seen = n.binary("less_equal", &format!("mask_{kind}_past"), iota(context, &slots), at)?;
    if let Some(window) = window.filter(|w| *w < context) {
        let from = n.binary("sub", &format!("mask_{kind}_from"), at, size(window))?;
        let near = n.binary("greater", &format!("mask_{kind}_near"), iota(context, &slots), from)?;
        seen = n.binary("logical_and", &format!("mask_{kind}_seen"), seen, near)?;
    }
    blocking(n, &format!("mask_{kind}"), seen)
}

/// 0 where `seen`, [`BLOCKED`] elsewhere.
pub(super) fn blocking(n: &mut Net<'_>, name: &str, seen: ValueId) -> Result<ValueId> {
    // Not `select` of two scalars: its type would be theirs.
    let float = n.float.name();
    let seen = n.op("cast", &format!("{name}_one"), [("x", seen.into()), ("dtype", float.into())])?;
    let unseen = n.binary("sub", &format!("{name}_unseen"), n.scalar(1.0), seen)?;
    n.binary("mul", name, unseen, n.scalar(BLOCKED))
}

/// The mask with each head's slope times the distance added: `[1, H, G, N]` or `[H, G, N, T]`.
pub(super) fn sloped(
    n: &mut Net<'_>,
    h: Heads,
    context: usize,
    position_ids: ValueId,
    slopes: &[f32],
    mask: ValueId,
) -> Result<ValueId> {
    let one = n.tokens == 1;
    let (slots, row) =
        if one { ([1, 1, 1, context], [1; 4]) } else { ([1, 1, context, 1], [1, 1, 1, n.tokens]) };
    let at = n.reshape("alibi_position", position_ids, &row)?;
    let distance = n.binary("sub", "alibi_distance", iota(context, &slots), at)?;
    let distance = n.cast("alibi_float", distance, n.float)?;
    let shape = if one { [1, h.kv, h.group(), 1] } else { [h.kv, h.group(), 1, 1] };
    let slopes = n.constant(&format!("alibi {slopes:?}"), &shape, slopes.to_vec());
    let bias = n.binary("mul", "alibi", distance, slopes)?;
    // Slots after the query are positive there, and blocked by the mask all the same.
    let bias = n.binary("minimum", "alibi_past", bias, n.scalar(0.0))?;
    n.binary("add", "alibi_mask", bias, mask)
}
