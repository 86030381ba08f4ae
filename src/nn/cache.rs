//! Attention over a key/value cache in Core ML state, for any number of new tokens.
//!
//! The cache is one state `[2 · layers, kv heads, context, head dim]`, keys first. New keys and values are
//! written first, then all of the context is attended to, later slots masked. Everything is a product of
//! matrices with the kv heads as batch, so that nothing cached is transposed and no head is repeated:
//!
//! ```text
//! one token:    scores [1, H, G, N] = q [1, H, G, D] · K [1, H, N, D]ᵀ      over the last axis
//! many tokens:  scores [H, G, N, T] = K [H, 1, N, D] · q [H, G, D, T]       over the keys' axis
//! ```
//!
//! where G query heads share each of H kv heads, N is the context and T the number of tokens.

use super::{Hidden, Net, attention::BLOCKED, head_norm::HeadNorm, rotary::Rope, stack::Projection};
use crate::{
    bail,
    error::Result,
    graph::In,
    mil::{Const, DType, TensorType, Type, ValueId},
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

/// What a function makes once from its positions, and the cache as it is so far.
pub struct Steps {
    pub heads: Heads,
    /// Slots that this function sees.
    pub context: usize,
    /// `[1, T]`, int32.
    pub position_ids: ValueId,
    update: Update,
    layers: usize,
    state: ValueId,
    cache: ValueId,
    /// Of each row of the state: where the new tokens begin and end.
    begins: Vec<ValueId>,
    ends: Vec<ValueId>,
    /// For blending: `[1, 1, N, T]` one-hot, and `[1, 1, N, 1]` the slots that stay.
    blend: Option<(ValueId, ValueId)>,
    blended: Vec<Option<ValueId>>,
    kinds: Vec<Prepared>,
}

/// A kind with its tables and mask made.
struct Prepared {
    kind: Kind,
    /// Factors for a head's channels and for the exchanged ones, `[1, D, 1, T]`.
    rotation: Option<(ValueId, ValueId)>,
    /// Added to scores: `[1, 1, 1, N]` for one token, `[1, 1, N, T]` for many.
    mask: ValueId,
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
}

impl Heads {
    pub fn group(&self) -> usize {
        self.query / self.kv.max(1)
    }
}

impl Steps {
    /// The state, and everything that depends on positions alone.
    pub fn new(n: &mut Net<'_>, setup: Setup, position_ids: ValueId) -> Result<Steps> {
        let Setup { heads, context, capacity, layers, kinds, slopes, update } = setup;
        let state_type = TensorType::new(DType::F16, [2 * layers, heads.kv, capacity, heads.padded]);
        let state = n.builder.input("kv_cache", Type::state(state_type))?;
        let (begins, ends) = match update {
            Update::Slice => bounds(n, heads, layers, position_ids)?,
            Update::Blend => (Vec::new(), Vec::new()),
        };
        let blend = match update {
            Update::Slice => None,
            Update::Blend => Some(one_hot(n, capacity, position_ids)?),
        };
        let mut prepared = Vec::with_capacity(kinds.len());
        for (i, kind) in kinds.into_iter().enumerate() {
            let rotation = match &kind.rope {
                Some(rope) => Some(rotation(n, rope, heads.padded, context, i, position_ids)?),
                None => None,
            };
            let mut mask = mask(n, context, i, position_ids, kind.window)?;
            if let Some(slopes) = &slopes {
                mask = sloped(n, heads, context, position_ids, slopes, mask)?;
            }
            prepared.push(Prepared { kind, rotation, mask });
        }
        let cache = n.op("read_state", "cache", [("input", state.into())])?;
        let blended = vec![None; 2 * layers];
        Ok(Steps {
            heads,
            context,
            position_ids,
            update,
            layers,
            state,
            cache,
            begins,
            ends,
            blend,
            blended,
            kinds: prepared,
        })
    }

    /// Ends the function: a blended cache is written back.
    pub fn finish(&mut self, n: &mut Net<'_>) -> Result<()> {
        if self.update == Update::Blend {
            let rows: Vec<ValueId> = self.blended.iter().flatten().copied().collect();
            let all =
                n.op("concat", "cache_blended", [("values", In::from(rows.as_slice())), ("axis", 0.into())])?;
            n.ops("write_state", "cache_write_state", [("input", self.state.into()), ("data", all.into())])?;
        }
        Ok(())
    }

    /// Puts new `[1, H, T, D]` into a row of the cache and gives the row, `[1, H, N, D]`.
    fn store(&mut self, n: &mut Net<'_>, name: &str, row: usize, new: ValueId) -> Result<ValueId> {
        let new = n.cast(&format!("{name}_half"), new, DType::F16)?;
        let held = match self.update {
            Update::Slice => {
                let whole = n.op(
                    "slice_update",
                    &format!("{name}_update"),
                    [
                        ("x", self.cache.into()),
                        ("update", new.into()),
                        ("begin", self.begins[row].into()),
                        ("end", self.ends[row].into()),
                        ("stride", [1, 1, 1, 1].into()),
                        ("begin_mask", In::from(&[false; 4][..])),
                        ("end_mask", In::from(&[false; 4][..])),
                        ("squeeze_mask", In::from(&[false; 4][..])),
                    ],
                )?;
                n.ops(
                    "write_state",
                    &format!("{name}_write_state"),
                    [("input", self.state.into()), ("data", whole.into())],
                )?;
                self.cache = n.op("read_state", &format!("{name}_cache"), [("input", self.state.into())])?;
                self.row(n, name, row, self.context)?
            }
            Update::Blend => {
                let (placed, kept) = self.blend.ok_or_else(|| crate::Error::new("no one-hot mask"))?;
                let old = self.row(n, name, row, n.builder.shape(self.cache)?[2])?;
                let old = n.binary("mul", &format!("{name}_kept"), old, kept)?;
                let new = match n.tokens {
                    1 => n.binary("mul", &format!("{name}_placed"), new, placed)?,
                    _ => n.matmul(&format!("{name}_placed"), placed, new, false, false)?,
                };
                let whole = n.binary("add", &format!("{name}_blended"), old, new)?;
                self.blended[row] = Some(whole);
                let shape = n.builder.shape(whole)?;
                if shape[2] == self.context {
                    whole
                } else {
                    let size = [1, shape[1], self.context, shape[3]];
                    n.slice(&format!("{name}_seen"), whole, &[0, 0, 0, 0], &size)?
                }
            }
        };
        n.cast(&format!("{name}_float"), held, n.float)
    }

    fn row(&self, n: &mut Net<'_>, name: &str, row: usize, slots: usize) -> Result<ValueId> {
        let size = [1, self.heads.kv, slots, self.heads.padded];
        n.slice(&format!("{name}_row"), self.cache, &[row, 0, 0, 0], &size)
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
        let k = steps.store(self, &format!("{name}.k"), layer, k)?;
        let v = steps.store(self, &format!("{name}.v"), steps.layers + layer, v)?;
        let mask = steps.kinds[kind].mask;
        let g = h.group();
        let y = if t == 1 {
            let q = self.reshape(&format!("{name}.q_heads"), q, &[1, h.kv, g, h.padded])?;
            let scores = self.matmul(&format!("{name}.scores"), q, k, false, true)?;
            let weights = self.softmax_masked(name, scores, mask, a.soft_cap, -1)?;
            self.matmul(&format!("{name}.values"), weights, v, false, false)?
        } else {
            let q = self.reshape(&format!("{name}.q_heads"), q, &[h.kv, g, h.padded, t])?;
            let per_head = [h.kv, 1, steps.context, h.padded];
            let k = self.reshape(&format!("{name}.k_heads"), k, &per_head)?;
            let v = self.reshape(&format!("{name}.v_heads"), v, &per_head)?;
            let scores = self.matmul(&format!("{name}.scores"), k, q, false, false)?;
            let weights = self.softmax_masked(name, scores, mask, a.soft_cap, 2)?;
            self.matmul(&format!("{name}.values"), v, weights, true, false)?
        };
        Ok(Hidden(self.reshape(&format!("{name}.out"), y, &[1, h.query * h.padded, 1, t])?))
    }

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
    fn rotate_heads(
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
    fn as_rows(&mut self, name: &str, x: ValueId, heads: usize, dim: usize) -> Result<ValueId> {
        if self.tokens == 1 {
            return self.reshape(&format!("{name}_rows"), x, &[1, heads, 1, dim]);
        }
        let x = self.reshape(&format!("{name}_columns"), x, &[1, heads, dim, self.tokens])?;
        self.op("transpose", &format!("{name}_rows"), [("x", x.into()), ("perm", [0, 1, 3, 2].into())])
    }

    fn softmax_masked(
        &mut self,
        name: &str,
        scores: ValueId,
        mask: ValueId,
        cap: Option<f32>,
        axis: i32,
    ) -> Result<ValueId> {
        let scores = match cap {
            Some(cap) => {
                let t = self.op("tanh", &format!("{name}.capped"), [("x", scores.into())])?;
                self.binary("mul", &format!("{name}.cap"), t, self.scalar(cap))?
            }
            None => scores,
        };
        let masked = self.binary("add", &format!("{name}.masked"), scores, mask)?;
        self.op("softmax", &format!("{name}.weights"), [("x", masked.into()), ("axis", axis.into())])
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

/// Rows of a projection with each head padded, its rotary pairs in halves.
fn spread(p: Projection, heads: usize, h: Heads, order: Option<&[usize]>) -> Projection {
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

pub(super) fn size(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(i32::MAX)
}

/// 0, 1, 2 … as int32.
fn iota(n: usize, shape: &[usize]) -> In {
    let values = (0..size(n)).collect();
    Const::literal(TensorType::new(DType::I32, shape.iter().copied()), crate::mil::Literal::Ints(values))
        .into()
}

/// Where the new tokens go in each row of the state: begins and ends `[row, 0, position, 0]`, all from two
/// sums.
fn bounds(
    n: &mut Net<'_>,
    h: Heads,
    layers: usize,
    position_ids: ValueId,
) -> Result<(Vec<ValueId>, Vec<ValueId>)> {
    let first = n.op(
        "slice_by_size",
        "first_position",
        [("x", position_ids.into()), ("begin", [0, 0].into()), ("size", [1, 1].into())],
    )?;
    let first = n.op("reshape", "position", [("x", first.into()), ("shape", [1].into())])?;
    let rows = 2 * layers;
    let vector = |f: &dyn Fn(usize) -> [usize; 4]| -> In {
        let values: Vec<i32> = (0..rows).flat_map(f).map(size).collect();
        Const::ints(&values).into()
    };
    let moving = n.binary("mul", "position_in_rows", vector(&|_| [0, 0, 1, 0]), first)?;
    let tokens = n.tokens;
    let mut bounds = Vec::new();
    for (name, offsets) in
        [("begins", vector(&|r| [r, 0, 0, 0])), ("ends", vector(&|r| [r + 1, h.kv, tokens, h.padded]))]
    {
        let all = n.binary("add", name, moving, offsets)?;
        bounds.push(n.split_channels(&format!("{name}_of_rows"), all, 0, rows)?);
    }
    let ends = bounds.pop().unwrap_or_default();
    Ok((bounds.pop().unwrap_or_default(), ends))
}

/// Which slot each token goes to, `[1, 1, N, T]`, and which slots keep what they hold, `[1, 1, N, 1]`.
fn one_hot(n: &mut Net<'_>, slots: usize, position_ids: ValueId) -> Result<(ValueId, ValueId)> {
    let at = n.reshape("slot_positions", position_ids, &[1, 1, 1, n.tokens])?;
    let hit = n.binary("equal", "slot_hit", iota(slots, &[1, 1, slots, 1]), at)?;
    let placed = n.op("cast", "slot_placed", [("x", hit.into()), ("dtype", "fp16".into())])?;
    let taken = n.op(
        "reduce_sum",
        "slot_taken",
        [("x", placed.into()), ("axes", [3].into()), ("keep_dims", true.into())],
    )?;
    let kept = n.binary("sub", "slot_kept", In::float(DType::F16, 1.0), taken)?;
    Ok((placed, kept))
}

/// Rotary factors of the function's positions, `[1, D, 1, T]` each.
fn rotation(
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
fn mask(
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
    // Not `select` of two scalars: its type would be theirs.
    let float = n.float.name();
    let seen = n.op("cast", &format!("mask_{kind}_one"), [("x", seen.into()), ("dtype", float.into())])?;
    let unseen = n.binary("sub", &format!("mask_{kind}_unseen"), n.scalar(1.0), seen)?;
    n.binary("mul", &format!("mask_{kind}"), unseen, n.scalar(BLOCKED))
}

/// The mask with each head's slope times the distance added: `[1, H, G, N]` or `[H, G, N, T]`.
fn sloped(
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
