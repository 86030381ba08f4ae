//! Heads of projections: padded, with rotary pairs in halves, and as rows of the cache.

use super::{Heads, size};
use crate::{
    bail,
    error::Result,
    graph::In,
    mil::{DType, ValueId},
    nn::{Hidden, Net, stack::Projection},
};

/// Rows of a projection with each head padded, its rotary pairs in halves.
pub(super) fn spread(p: Projection, heads: usize, h: Heads, order: Option<&[usize]>) -> Projection {
    let row = |head: usize, i: usize| {
        let from = match order {
            _ if i >= h.dim => return None,
            Some(order) => order[i],
            None => i,
        };
        p.rows.get(head * h.dim + from).copied().flatten()
    };
    let rows =
        (0..heads).flat_map(|head| (0..h.padded).map(move |i| (head, i))).map(|(head, i)| row(head, i));
    Projection { rows: rows.collect(), ..p }
}

impl Net<'_> {
    /// The output projection: its input channels are padded as the heads are.
    pub fn attention_output(&mut self, name: &str, heads: Heads, p: Projection, x: Hidden) -> Result<Hidden> {
        let (dim, padded, query) = (heads.dim, heads.padded, heads.query);
        let out = p.weight.shape[0];
        if p.weight.shape[1] != query * dim {
            bail!("{}: {:?} does not take {query} heads of {dim}", self.place(name), p.weight.shape);
        }
        if dim == padded {
            return self.stacked(name, &[p], x);
        }
        let how = format!("columns {dim} of {padded}");
        let weight = p.weight.map(&how, DType::F32, [out, query * padded], move |w| {
            let mut wide = vec![0.0; out * query * padded];
            for (i, v) in w.iter().enumerate() {
                let (row, column) = (i / (query * dim), i % (query * dim));
                wide[row * query * padded + column / dim * padded + column % dim] = *v;
            }
            Ok(wide)
        });
        self.stacked(name, &[Projection { weight, ..p }], x)
    }

    /// Turns the first `dims` channels of every head of `[heads, D, 1, T]`.
    pub(super) fn rotate_heads(
        &mut self,
        name: &str,
        x: ValueId,
        dims: usize,
        (straight, crossed): (ValueId, ValueId),
    ) -> Result<ValueId> {
        let width = self.builder.shape(x)?[1];
        let mut sizes = vec![size(dims / 2), size(dims / 2)];
        if width > dims {
            sizes.push(size(width - dims));
        }
        let mut parts = self.ops(
            "split",
            &format!("{name}.halves"),
            [("x", x.into()), ("split_sizes", In::from(sizes.as_slice())), ("axis", 1.into())],
        )?;
        parts.swap(0, 1);
        let exchanged = self.op(
            "concat",
            &format!("{name}.exchanged"),
            [("values", In::from(parts.as_slice())), ("axis", 1.into())],
        )?;
        let a = self.binary("mul", &format!("{name}.straight"), x, straight)?;
        let b = self.binary("mul", &format!("{name}.crossed"), exchanged, crossed)?;
        self.binary("add", &format!("{name}.rotated"), a, b)
    }

    /// Heads of channels as rows of the cache: `[1, H, T, D]`. One token needs no transpose.
    pub(super) fn as_rows(&mut self, name: &str, x: ValueId, heads: usize, dim: usize) -> Result<ValueId> {
        if self.tokens == 1 {
            return self.reshape(&format!("{name}_rows"), x, &[1, heads, 1, dim]);
        }
        let x = self.reshape(&format!("{name}_columns"), x, &[1, heads, dim, self.tokens])?;
        self.op("transpose", &format!("{name}_rows"), [("x", x.into()), ("perm", [0, 1, 3, 2].into())])
    }
}
