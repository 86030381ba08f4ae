//! Attention over a key/value cache in Core ML state, for any number of new tokens.
//!
//! The cache is one state `[2 · layers, kv heads, context, head dim]`, keys first, and nothing that is
//! cached is ever transposed. Each function has one of three forms:
//!
//! ```text
//! dense         new keys and values are written first, then all of the context is attended to, later
//!               slots masked
//!   one token:    scores [1, H, G, N] = q [1, H, G, D] · K [1, H, N, D]ᵀ     over the last axis
//!   many tokens:  scores [H, G, N, T] = K [H, 1, N, D] · q [H, G, D, T]      over the keys' axis
//! tiled         past keys tile by tile, the new ones from their projections ([`tiled`])
//! block-sparse  a few blocks of past keys exactly, the others by their means ([`sparse`])
//! ```
//!
//! where G query heads share each of H kv heads, N is the context and T the number of tokens.

mod heads;
mod masks;
pub mod sparse;
mod store;
pub mod tiled;

use heads::spread;
use masks::{mask, rotation, sloped};
use sparse::{Pooled, Sparse};
use store::Store;
use tiled::{Tiled, Tiles};

use super::{Hidden, Net, head_norm::HeadNorm, rotary::Rope, stack::Projection};
use crate::{
    bail,
    error::Result,
    graph::In,
    mil::{DType, ValueId},
};

/// How the cache takes new keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Update {
    /// `slice_update` of the state's own read, written back in place.
    Slice,
    /// Every slot is blended with a one-hot mask, and the whole state written at the end.
    Blend,
}

/// Sizes of attention, the same in all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    pub query: usize,
    pub kv: usize,
    /// Channels of a head in the checkpoint.
    pub dim: usize,
    /// Channels of a head here: a multiple of 32.
    pub padded: usize,
}

/// What the layers of one kind share beside the sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct Kind {
    pub rope: Option<Rope>,
    /// How many keys a query sees, itself included.
    pub window: Option<usize>,
}

/// How a function attends to what is cached.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Form {
    Dense,
    Tiled(Tiled),
    /// Tiles in the layers that stay exact.
    Sparse(Sparse, Tiled),
}

/// What a function makes once from its positions, and the cache as it is so far.
pub struct Steps {
    pub heads: Heads,
    /// Slots that this function sees.
    pub context: usize,
    /// `[1, T]`, int32.
    pub position_ids: ValueId,
    layers: usize,
    first_layer: usize,
    form: Form,
    cache: Store,
    pooled: Option<Pooled>,
    kinds: Vec<Prepared>,
}

/// A kind with its tables and masks made.
struct Prepared {
    kind: Kind,
    /// Factors for a head's channels and for the exchanged ones, `[1, D, 1, T]`.
    rotation: Option<(ValueId, ValueId)>,
    mask: Mask,
}

enum Mask {
    /// Added to scores: `[1, 1, 1, N]` for one token, `[1, 1, N, T]` for many.
    Whole(ValueId),
    Tiles(Tiles),
}

/// One layer's attention.
pub struct Attention {
    /// Queries, keys, values: each with its heads' channels in the checkpoint's order.
    pub qkv: [Projection; 3],
    pub scale: f32,
    pub soft_cap: Option<f32>,
    pub norm: HeadNorm,
}

/// What a function is built with.
pub struct Setup {
    pub heads: Heads,
    pub context: usize,
    /// Slots of the state, at least `context`.
    pub capacity: usize,
    pub layers: usize,
    pub kinds: Vec<Kind>,
    /// Bias by distance, as a slope per query head.
    pub slopes: Option<Vec<f32>>,
    pub update: Update,
    pub form: Form,
    /// The number in the model of the first layer.
    pub first_layer: usize,
    /// Keys of a block whose mean the package keeps.
    pub block: Option<usize>,
}

impl Heads {
    pub fn group(&self) -> usize {
        self.query / self.kv.max(1)
    }
}

impl Steps {
    /// The states, and everything that depends on positions alone.
    pub fn new(n: &mut Net<'_>, setup: Setup, position_ids: ValueId) -> Result<Steps> {
        let Setup { heads, context, capacity, layers, kinds, slopes, update, form, first_layer, block } =
            setup;
        if slopes.is_some() && form != Form::Dense {
            bail!("bias by distance (ALiBi) is built with dense attention only"; hint: "`--attention dense`");
        }
        let shape = [2 * layers, heads.kv, capacity, heads.padded];
        let cache = Store::open(n, ("kv_cache", "cache"), shape, update, (position_ids, n.tokens))?;
        let pooled = match block {
            Some(block) if n.tokens == 1 => {
                store::touch(n, ("kv_mean", "mean"), [2 * layers, heads.kv, capacity / block, heads.padded])?;
                None
            }
            Some(block) => Some(Pooled::open(n, shape, block, update, position_ids)?),
            None => None,
        };
        let mut prepared = Vec::with_capacity(kinds.len());
        for (i, kind) in kinds.into_iter().enumerate() {
            let rotation = match &kind.rope {
                Some(rope) => Some(rotation(n, rope, heads.padded, context, i, position_ids)?),
                None => None,
            };
            let mask = match form {
                Form::Dense => {
                    let mut mask = mask(n, context, i, position_ids, kind.window)?;
                    if let Some(slopes) = &slopes {
                        mask = sloped(n, heads, context, position_ids, slopes, mask)?;
                    }
                    Mask::Whole(mask)
                }
                Form::Tiled(tiled) | Form::Sparse(_, tiled) => {
                    let runtime = update == Update::Slice;
                    Mask::Tiles(Tiles::prepare(
                        n,
                        tiled,
                        heads,
                        (i, kind.window),
                        shape[0],
                        position_ids,
                        runtime,
                    )?)
                }
            };
            prepared.push(Prepared { kind, rotation, mask });
        }
        let mut steps =
            Steps { heads, context, position_ids, layers, first_layer, form, cache, pooled, kinds: prepared };
        if let (Form::Sparse(sparse, _), Some(pooled)) = (form, &mut steps.pooled) {
            pooled.prepare(n, sparse, position_ids)?;
        }
        Ok(steps)
    }

    /// Ends the function: blended states are written back.
    pub fn finish(&mut self, n: &mut Net<'_>) -> Result<()> {
        self.cache.finish(n)?;
        match &mut self.pooled {
            Some(pooled) => pooled.finish(n),
            None => Ok(()),
        }
    }

    /// The window that layers of a kind see, where it is narrower than all there is.
    fn window(&self, kind: usize) -> Option<usize> {
        self.kinds[kind].kind.window.filter(|w| *w < self.context)
    }
}

impl Net<'_> {
    /// Attention of layer `layer` of this part, `kind` its kind: `[1, C, 1, T]` to
    /// `[1, query heads · padded dim, 1, T]`.
    pub fn cached_attention(
        &mut self,
        name: &str,
        steps: &mut Steps,
        (layer, kind): (usize, usize),
        a: Attention,
        x: Hidden,
    ) -> Result<Hidden> {
        let h = steps.heads;
        let t = self.tokens;
        let order = steps.kinds[kind].kind.rope.as_ref().map(|r| r.order(h.dim));
        let [q, k, v] = a.qkv;
        let folds = matches!(a.norm, HeadNorm::None);
        let cap = a.soft_cap.unwrap_or(1.0);
        let scale = a.scale / cap;
        let q = spread(q, h.query, h, order.as_deref()).scaled(if folds { scale } else { 1.0 });
        let k = spread(k, h.kv, h, order.as_deref());
        let v = spread(v, h.kv, h, None);
        let qkv = self.stacked(&format!("{name}.qkv"), &[q, k, v], x)?;
        let (both, kv) = ((h.query + h.kv) * h.padded, h.kv * h.padded);
        let parts = self.ops(
            "split",
            &format!("{name}.parts"),
            [("x", qkv.into()), ("split_sizes", In::from(&[size(both), size(kv)][..])), ("axis", 1.into())],
        )?;
        let (qk, v) = (parts[0], parts[1]);
        let qk = self.head_norm(name, h, &a.norm, order.as_deref(), scale, qk)?;
        let qk = match steps.kinds[kind].rotation {
            Some(rotation) => {
                let dims = steps.kinds[kind].kind.rope.as_ref().map_or(0, |r| r.dims);
                self.rotate_heads(name, qk, dims, rotation)?
            }
            None => qk,
        };
        let parts = self.ops(
            "split",
            &format!("{name}.qk_parts"),
            [
                ("x", qk.into()),
                ("split_sizes", In::from(&[size(h.query), size(h.kv)][..])),
                ("axis", 0.into()),
            ],
        )?;
        let (q, k) = (parts[0], parts[1]);
        let k = self.as_rows(&format!("{name}.k"), k, h.kv, h.padded)?;
        let v = self.as_rows(&format!("{name}.v"), v, h.kv, h.padded)?;
        let rows = (layer, steps.layers + layer);
        steps.cache.put(self, &format!("{name}.k"), rows.0, k)?;
        steps.cache.put(self, &format!("{name}.v"), rows.1, v)?;
        if let Some(pooled) = &mut steps.pooled {
            pooled.put(self, &format!("{name}.k"), rows.0, k)?;
            pooled.put(self, &format!("{name}.v"), rows.1, v)?;
        }
        let y = match (&steps.kinds[kind].mask, steps.form, &steps.pooled) {
            (Mask::Whole(mask), ..) => self.dense_attention(name, steps, rows, *mask, a.soft_cap, q)?,
            (Mask::Tiles(tiles), Form::Sparse(sparse, tiled), Some(pooled))
                if steps.first_layer + layer >= sparse.dense_layers && steps.window(kind).is_none() =>
            {
                let new = tiled::New { q, k, v, cap: a.soft_cap };
                self.sparse_attention(name, steps, (pooled, tiles), rows, (sparse, tiled), new)?
            }
            (Mask::Tiles(tiles), ..) => {
                let new = tiled::New { q, k, v, cap: a.soft_cap };
                self.tiled_attention(name, h, &steps.cache, tiles, rows, new)?
            }
        };
        Ok(Hidden(self.reshape(&format!("{name}.out"), y, &[1, h.query * h.padded, 1, t])?))
    }

    /// Queries `[query heads, D, 1, T]` against all of the context; gives the query heads' channels in
    /// order.
    fn dense_attention(
        &mut self,
        name: &str,
        steps: &Steps,
        rows: (usize, usize),
        mask: ValueId,
        cap: Option<f32>,
        q: ValueId,
    ) -> Result<ValueId> {
        let (h, t, context) = (steps.heads, self.tokens, steps.context);
        let g = h.group();
        let k = steps.cache.row(self, &format!("{name}.k"), rows.0, context)?;
        let v = steps.cache.row(self, &format!("{name}.v"), rows.1, context)?;
        if t == 1 {
            let q = self.reshape(&format!("{name}.q_heads"), q, &[1, h.kv, g, h.padded])?;
            let scores = self.matmul(&format!("{name}.scores"), q, k, false, true)?;
            let weights = self.softmax_masked(name, scores, mask, cap, -1)?;
            return self.matmul(&format!("{name}.values"), weights, v, false, false);
        }
        let q = self.reshape(&format!("{name}.q_heads"), q, &[h.kv, g, h.padded, t])?;
        let per_head = [h.kv, 1, context, h.padded];
        let k = self.reshape(&format!("{name}.k_heads"), k, &per_head)?;
        let v = self.reshape(&format!("{name}.v_heads"), v, &per_head)?;
        let scores = self.matmul(&format!("{name}.scores"), k, q, false, false)?;
        let weights = self.softmax_masked(name, scores, mask, cap, 2)?;
        self.matmul(&format!("{name}.values"), v, weights, true, false)
    }

    fn softmax_masked(
        &mut self,
        name: &str,
        scores: ValueId,
        mask: ValueId,
        cap: Option<f32>,
        axis: i32,
    ) -> Result<ValueId> {
        let scores = self.capped(name, scores, cap)?;
        let masked = self.binary("add", &format!("{name}.masked"), scores, mask)?;
        self.op("softmax", &format!("{name}.weights"), [("x", masked.into()), ("axis", axis.into())])
    }

    /// `cap · tanh(x)`; the queries carry the division.
    fn capped(&mut self, name: &str, scores: ValueId, cap: Option<f32>) -> Result<ValueId> {
        let Some(cap) = cap else { return Ok(scores) };
        let t = self.op("tanh", &format!("{name}.capped"), [("x", scores.into())])?;
        self.binary("mul", &format!("{name}.cap"), t, self.scalar(cap))
    }

    pub(super) fn reshape(&mut self, name: &str, x: ValueId, shape: &[usize]) -> Result<ValueId> {
        if self.builder.shape(x)? == shape {
            return Ok(x);
        }
        let shape: Vec<i32> = shape.iter().map(|d| size(*d)).collect();
        self.op("reshape", name, [("x", x.into()), ("shape", In::from(shape.as_slice()))])
    }

    pub(super) fn slice(&mut self, name: &str, x: ValueId, begin: &[usize], of: &[usize]) -> Result<ValueId> {
        if self.builder.shape(x)? == of {
            return Ok(x);
        }
        let ints = |v: &[usize]| v.iter().map(|d| size(*d)).collect::<Vec<i32>>();
        let (begin, of) = (ints(begin), ints(of));
        let params =
            [("x", x.into()), ("begin", In::from(begin.as_slice())), ("size", In::from(of.as_slice()))];
        self.op("slice_by_size", name, params)
    }

    fn matmul(&mut self, name: &str, x: ValueId, y: ValueId, tx: bool, ty: bool) -> Result<ValueId> {
        self.op(
            "matmul",
            name,
            [("x", x.into()), ("y", y.into()), ("transpose_x", tx.into()), ("transpose_y", ty.into())],
        )
    }

    pub fn cast(&mut self, name: &str, x: ValueId, to: DType) -> Result<ValueId> {
        if self.builder.tensor(x)?.dtype == to {
            return Ok(x);
        }
        self.op("cast", name, [("x", x.into()), ("dtype", to.name().into())])
    }
}

pub(super) fn size(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

#[cfg(test)]
mod golden;
