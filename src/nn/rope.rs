//! Rotary position embedding: pairs (i, i + dim/2) of a head's channels are turned by an angle that grows
//! with the position.
//!
//! All heads are rotated at once. Projections give their channels *in halves*, first the first halves of
//! all heads, then the second ones, so that one split serves every head; scores do not mind the order,
//! as queries and keys have the same.

use super::{Heads, Hidden, Net, linear::Rows};
use crate::{error::Result, graph::In, mil::ValueId};

/// cos and sin `[1, heads · dim/2, 1, S]`, made once per function.
#[derive(Debug, Clone)]
pub struct Rotation {
    cos: In,
    sin: In,
}

/// A projection in halves, rotated.
#[derive(Debug, Clone, Copy)]
pub struct Halves(ValueId, ValueId);

impl Net<'_> {
    /// Tables for positions 0 … S−1, computed in double precision:
    /// angle = position · theta^(−2i/dim), the plain form of [RoFormer](https://arxiv.org/abs/2104.09864).
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "positions and rounding"
    )]
    pub fn rotation(&self, theta: f64, heads: usize, dim: usize) -> Rotation {
        let (half, tokens) = (dim / 2, self.tokens);
        let table = |f: fn(f64) -> f64| {
            (0..heads * half)
                .flat_map(|c| {
                    let frequency = theta.powf(-2.0 * (c % half) as f64 / dim as f64);
                    (0..tokens).map(move |p| f(p as f64 * frequency) as f32)
                })
                .collect::<Vec<f32>>()
        };
        let shape = [1, heads * half, 1, tokens];
        Rotation {
            cos: self.constant(&format!("rope cos {theta} {dim}"), &shape, table(f64::cos)),
            sin: self.constant(&format!("rope sin {theta} {dim}"), &shape, table(f64::sin)),
        }
    }

    /// Turns a projection in halves.
    pub fn rotate(&mut self, name: &str, x: Hidden, rotation: &Rotation) -> Result<Halves> {
        let halves = self.split_channels(&format!("{name}_halves"), x.0, 1, 2)?;
        let (a, b) = (halves[0], halves[1]);
        let (cos, sin) = (&rotation.cos, &rotation.sin);
        let first = self.binary("mul", &format!("{name}_a_cos"), a, cos.clone())?;
        let second = self.binary("mul", &format!("{name}_b_sin"), b, sin.clone())?;
        let first = self.binary("sub", &format!("{name}_first"), first, second)?;
        let second = self.binary("mul", &format!("{name}_b_cos"), b, cos.clone())?;
        let third = self.binary("mul", &format!("{name}_a_sin"), a, sin.clone())?;
        let second = self.binary("add", &format!("{name}_second"), second, third)?;
        Ok(Halves(first, second))
    }

    /// Queries per head from rotated halves.
    pub fn rotated_heads(&mut self, name: &str, x: Halves, heads: usize) -> Result<Heads> {
        let first = self.split_channels(&format!("{name}_first"), x.0, 1, heads)?;
        let second = self.split_channels(&format!("{name}_second"), x.1, 1, heads)?;
        self.join_pairs(name, &first, &second, 1)
    }

    /// Keys per head from rotated halves, transposed once for all heads.
    pub fn rotated_keys(&mut self, name: &str, x: Halves, heads: usize) -> Result<Heads> {
        let whole = self.concat_channels(&format!("{name}_rotated"), &[x.0, x.1])?;
        let Heads(parts) = self.keys(name, whole, 2 * heads)?;
        let (first, second) = parts.split_at(heads);
        self.join_pairs(name, first, second, 3)
    }

    fn join_pairs(&mut self, name: &str, first: &[ValueId], second: &[ValueId], axis: i32) -> Result<Heads> {
        let mut heads = Vec::with_capacity(first.len());
        for (a, b) in first.iter().zip(second) {
            let values = In::from(&[*a, *b][..]);
            heads.push(self.op(
                "concat",
                &format!("{name}_head"),
                [("values", values), ("axis", axis.into())],
            )?);
        }
        Ok(Heads(heads))
    }
}

impl Rows {
    /// Rows `from …` of a projection of `heads` heads, in halves and scaled.
    pub fn in_halves(from: usize, heads: usize, dim: usize, scale: f32) -> Rows {
        let half = dim / 2;
        let order = (0..2)
            .flat_map(|part| (0..heads).map(move |h| (part, h)))
            .flat_map(|(part, h)| (0..half).map(move |i| from + h * dim + part * half + i))
            .collect();
        Rows { order, scale }
    }
}
