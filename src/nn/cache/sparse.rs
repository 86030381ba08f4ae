//! Block-sparse attention with a fixed budget, after FlashPrefill V2 (arXiv:2608.19758).
//!
//! Past keys lie in blocks of B slots, of which the package keeps the means k̄ and v̄ in a state of their own.
//! A chunk's queries score all past blocks by their means, and the best ones are attended to exactly, sinks
//! and the newest always among them; every other block takes part as one key of B times the weight:
//!
//! ```text
//! z = k̄ q + valid                  [1, H, blocks, W]     E = Σ over columns of softmax over blocks (z)
//! R = the budget's best of E + force
//! O = attention over { new keys,  K[R], V[R],  k̄, v̄ with scores z + ln B, but −10⁴ where in R }
//! ```
//!
//! Two ways lead from E to K[R]: `topk` and `gather`, or ranks from comparisons of all pairs and a product
//! with a one-hot matrix, which needs neither integers nor an indexed read.

use super::{
    Heads, Steps, Update,
    masks::iota,
    size,
    store::{Store, declare, first, update},
    tiled::{Keys, Merge, New, Tiled, Tiles, cut},
};
use crate::{error::Result, graph::In, mil::ValueId, nn::Net};

/// How a function chooses blocks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sparse {
    /// Keys of a block.
    pub block: usize,
    /// Past blocks attended to exactly.
    pub budget: usize,
    /// First blocks that are always among them.
    pub sinks: usize,
    /// Newest past blocks that are always among them.
    pub window: usize,
    /// Chosen blocks below this share of the best one's energy are left to their means; 0 leaves none.
    pub alpha: f32,
    /// First layers that stay exact.
    pub dense_layers: usize,
    pub gather: Gather,
    pub select: Select,
    pub scoring: Scoring,
    /// Whether blocks that are not chosen take part by their means.
    pub correction: bool,
}

/// How chosen blocks are fetched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gather {
    /// `topk` and `gather`: CPU and GPU.
    Index,
    /// Ranks and a one-hot product: the Neural Engine too.
    OneHot,
}

/// Who chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Select {
    /// Each kv head.
    Head,
    /// All heads of a layer together.
    Layer,
}

/// What a block's energy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scoring {
    /// The sum of each column's softmax over the blocks.
    Row,
    /// The sum of exponentials below the head's largest score, as published.
    Tile,
}

/// What is added to keys that must not be seen, and to energies that must win or lose.
const OFF: f32 = -1.0e4;

/// Means of blocks of keys and values, in a state.
pub(super) struct Pooled {
    store: Store,
    shape: [usize; 4],
    block: usize,
    bias: Option<Bias>,
}

/// What depends on the position alone, `[1, 1, blocks, 1]`.
#[derive(Clone, Copy)]
struct Bias {
    /// 0 for blocks that are past, [`OFF`] elsewhere.
    valid: ValueId,
    /// 1 for blocks that are always chosen.
    forced: ValueId,
    /// What energies are raised by.
    force: ValueId,
    /// ln B for past blocks.
    mass: ValueId,
}

/// What was chosen.
struct Chosen {
    /// Keys and values `[1, H, budget · B, D]`.
    keys: [ValueId; 2],
    /// 1 for blocks that are attended to exactly, `[1, 1 or H, blocks, 1]`.
    exact: ValueId,
    /// For each chosen key what is added to its scores, `[1, 1 or H, budget · B, 1]`.
    bias: Option<ValueId>,
}

impl Pooled {
    /// Declares the state for a cache of `shape` and readies it for the blocks of a call.
    pub(super) fn open(
        n: &mut Net<'_>,
        [rows, heads, slots, channels]: [usize; 4],
        block: usize,
        update: Update,
        position_ids: ValueId,
    ) -> Result<Pooled> {
        let (shape, count) = ([rows, heads, slots / block, channels], n.tokens / block);
        let pos = first(n, "mean_first", position_ids)?;
        let from = n.binary("floor_div", "mean_block", pos, size(block))?;
        let blocks = n.binary("add", "mean_blocks", iota(count, &[1, count]), from)?;
        let store = Store::open(n, ("kv_mean", "mean"), shape, update, (blocks, count))?;
        Ok(Pooled { store, shape, block, bias: None })
    }

    /// Makes what the choice needs of the position.
    pub(super) fn prepare(&mut self, n: &mut Net<'_>, sparse: Sparse, position_ids: ValueId) -> Result<()> {
        let blocks = self.shape[2];
        let all = iota(blocks, &[1, 1, blocks, 1]);
        let pos = first(n, "block_position", position_ids)?;
        let done = n.binary("floor_div", "blocks_done", pos, size(self.block))?;
        let past = n.binary("less", "block_is_past", all.clone(), done)?;
        let newest = n.binary("sub", "block_newest", done, size(sparse.window))?;
        let near = n.binary("greater_equal", "block_is_near", all.clone(), newest)?;
        let sink = n.binary("less", "block_is_sink", all, size(sparse.sinks))?;
        let kept = n.binary("logical_or", "block_is_kept", near, sink)?;
        let kept = n.binary("logical_and", "block_is_forced", kept, past)?;
        let float = n.float;
        let past = n.cast("block_past", past, float)?;
        let forced = n.cast("block_forced", kept, float)?;
        let unseen = n.binary("sub", "block_unseen", n.scalar(1.0), past)?;
        let valid = n.binary("mul", "block_valid", unseen, n.scalar(OFF))?;
        let up = n.binary("mul", "block_up", forced, n.scalar(-OFF))?;
        let force = n.binary("add", "block_force", valid, up)?;
        #[expect(clippy::cast_precision_loss, reason = "a block has few keys")]
        let mass = n.binary("add", "block_mass", valid, n.scalar((self.block as f32).ln()))?;
        self.bias = Some(Bias { valid, forced, force, mass });
        Ok(())
    }

    /// Stores the means of new `[1, H, T, D]`.
    pub(super) fn put(&mut self, n: &mut Net<'_>, place: &str, row: usize, new: ValueId) -> Result<()> {
        let [_, heads, _, channels] = self.shape;
        let count = n.tokens / self.block;
        let x = n.reshape(&format!("{place}_blocks"), new, &[heads, count, self.block, channels])?;
        let x = n.op(
            "reduce_mean",
            &format!("{place}_means"),
            [("x", x.into()), ("axes", [2].into()), ("keep_dims", false.into())],
        )?;
        let x = n.reshape(&format!("{place}_mean"), x, &[1, heads, count, channels])?;
        self.store.put(n, &format!("{place}_mean"), row, x)
    }

    /// Means of all earlier blocks of a row, `[1, H, blocks, D]`.
    fn means(&self, n: &mut Net<'_>, name: &str, row: usize) -> Result<ValueId> {
        let [_, heads, blocks, _] = self.shape;
        let held = self.store.slots(n, name, row, 0..heads, 0..blocks)?;
        n.cast(&format!("{name}_float"), held, n.float)
    }

    pub(super) fn finish(&mut self, n: &mut Net<'_>) -> Result<()> {
        self.store.finish(n)
    }
}

/// The function that makes all means anew from the cache; gives what it is to return.
pub fn repool(
    n: &mut Net<'_>,
    heads: Heads,
    (layers, slots, block): (usize, usize, usize),
) -> Result<ValueId> {
    let (rows, blocks) = (2 * layers, slots / block);
    let cache = declare(n, "kv_cache", [rows, heads.kv, slots, heads.padded])?;
    let mean = declare(n, "kv_mean", [rows, heads.kv, blocks, heads.padded])?;
    let cache = n.op("read_state", "cache", [("input", cache.into())])?;
    let mut held = n.op("read_state", "mean", [("input", mean.into())])?;
    for row in 0..rows {
        let x =
            n.slice(&format!("row_{row}"), cache, &[row, 0, 0, 0], &[1, heads.kv, slots, heads.padded])?;
        let x = n.reshape(&format!("row_{row}_blocks"), x, &[heads.kv, blocks, block, heads.padded])?;
        let x = n.op(
            "reduce_mean",
            &format!("row_{row}_means"),
            [("x", x.into()), ("axes", [2].into()), ("keep_dims", false.into())],
        )?;
        let x = n.reshape(&format!("row_{row}_mean"), x, &[1, heads.kv, blocks, heads.padded])?;
        let begin = [size(row), 0, 0, 0].into();
        let end = [size(row + 1), size(heads.kv), size(blocks), size(heads.padded)].into();
        update(n, &format!("row_{row}"), mean, held, x, (begin, end))?;
        held = n.op("read_state", &format!("row_{row}_after"), [("input", mean.into())])?;
    }
    // A function has to give something: the first mean, which is small.
    n.slice("pooled", held, &[0, 0, 0, 0], &[1, 1, 1, heads.padded])
}

impl Net<'_> {
    /// Attention of one layer; gives the query heads' channels in order.
    pub(super) fn sparse_attention(
        &mut self,
        name: &str,
        steps: &Steps,
        (pooled, tiles): (&Pooled, &Tiles),
        rows: (usize, usize),
        (sparse, tiled): (Sparse, Tiled),
        new: New,
    ) -> Result<ValueId> {
        let h = steps.heads;
        let Some(bias) = pooled.bias else {
            return Err(crate::Error::new("block-sparse attention without its biases"));
        };
        let q = self.packed(name, h, new.q)?;
        let k_mean = pooled.means(self, &format!("{name}.k_means"), rows.0)?;
        let v_mean = pooled.means(self, &format!("{name}.v_means"), rows.1)?;
        let z = self.matmul(&format!("{name}.block_scores"), k_mean, q, false, false)?;
        let energy = self.energy(name, sparse, bias, z)?;
        let blocks = [rows.0, rows.1].map(|row| (row, h.kv, pooled.shape[2]));
        let chosen = self.choose(name, steps, sparse, bias, energy, blocks)?;
        let off = self.binary("mul", &format!("{name}.exact_off"), chosen.exact, self.scalar(OFF))?;
        let mass = self.binary("add", &format!("{name}.block_bias"), bias.mass, off)?;
        let pooled_scores = self.binary("add", &format!("{name}.pooled_scores"), z, mass)?;
        let mut parts = Vec::new();
        let tensors = [q, new.k, new.v, chosen.keys[0], chosen.keys[1], pooled_scores, v_mean];
        for (place, heads, [q, k, v, k_chosen, v_chosen, pooled_scores, v_mean]) in
            self.grouped(name, h, tiled.group, tensors)?
        {
            let mut merge = Merge::new(q, new.cap, false);
            self.add_new(&place, &mut merge, tiles, (heads.len(), h.padded), (k, v))?;
            let tile = (tiled.tile / sparse.block).max(1) * sparse.block;
            for keys in cut(sparse.budget * sparse.block, tile) {
                let at = format!("{place}.chosen_{}", keys.start);
                let (begin, of) = ([0, 0, keys.start, 0], [1, heads.len(), keys.len(), h.padded]);
                let k = self.slice(&format!("{at}_k"), k_chosen, &begin, &of)?;
                let v = self.slice(&format!("{at}_v"), v_chosen, &begin, &of)?;
                let bias = match chosen.bias {
                    Some(bias) => {
                        let all = self.builder.shape(bias)?[1];
                        let (from, n) = if all == 1 { (0, 1) } else { (heads.start, heads.len()) };
                        let begin = [0, from, keys.start, 0];
                        Some(self.slice(&format!("{at}_bias"), bias, &begin, &[1, n, keys.len(), 1])?)
                    }
                    None => None,
                };
                merge.add(self, &at, Keys { k, v, bias: bias.map(In::from) })?;
            }
            if sparse.correction {
                merge.add_scores(self, &format!("{place}.pooled"), pooled_scores, None, v_mean)?;
            }
            parts.push(merge.finish(self, &place)?);
        }
        let y = self.join(&format!("{name}.groups"), &parts, 1)?;
        self.unpacked(name, h, y)
    }

    /// What each block is worth, `[1, 1 or H, blocks, 1]`.
    fn energy(&mut self, name: &str, sparse: Sparse, bias: Bias, z: ValueId) -> Result<ValueId> {
        let z = self.binary("add", &format!("{name}.past_scores"), z, bias.valid)?;
        let e = match sparse.scoring {
            Scoring::Row => {
                self.op("softmax", &format!("{name}.block_weights"), [("x", z.into()), ("axis", 2.into())])?
            }
            Scoring::Tile => {
                let top = self.op(
                    "reduce_max",
                    &format!("{name}.block_top"),
                    [("x", z.into()), ("axes", [2, 3].into()), ("keep_dims", true.into())],
                )?;
                let below = self.binary("sub", &format!("{name}.block_below"), z, top)?;
                self.op("exp", &format!("{name}.block_weights"), [("x", below.into())])?
            }
        };
        let e = self.sum(&format!("{name}.head_energy"), e, 3)?;
        match sparse.select {
            Select::Head => Ok(e),
            Select::Layer => self.sum(&format!("{name}.energy"), e, 1),
        }
    }

    fn choose(
        &mut self,
        name: &str,
        steps: &Steps,
        sparse: Sparse,
        bias: Bias,
        energy: ValueId,
        [(k_row, heads, blocks), (v_row, ..)]: [(usize, usize, usize); 2],
    ) -> Result<Chosen> {
        let (dim, choosers) = (steps.heads.padded, self.builder.shape(energy)?[1]);
        let width = sparse.block * dim;
        let raised = self.binary("add", &format!("{name}.raised"), energy, bias.force)?;
        let picked = match sparse.gather {
            Gather::Index => self.best(name, sparse, raised, (choosers, blocks))?,
            Gather::OneHot => self.ranked(name, sparse, raised, (choosers, blocks))?,
        };
        let mut keys = [picked.member; 2];
        for (i, (of, row)) in [("k", k_row), ("v", v_row)].into_iter().enumerate() {
            let at = format!("{name}.{of}_blocks");
            let held =
                steps.cache.slots(self, &format!("{at}_row"), row, 0..heads, 0..blocks * sparse.block)?;
            let held = self.cast(&format!("{at}_float"), held, self.float)?;
            let held = self.reshape(&at, held, &[1, heads, blocks, width])?;
            let found =
                self.fetch(&format!("{name}.{of}_chosen"), &picked, held, (choosers, heads, width))?;
            keys[i] = self.reshape(
                &format!("{name}.{of}_chosen"),
                found,
                &[1, heads, sparse.budget * sparse.block, dim],
            )?;
        }
        if sparse.alpha <= 0.0 {
            return Ok(Chosen { keys, exact: picked.member, bias: None });
        }
        // Below the threshold, and not forced.
        let top = self.largest(&format!("{name}.best"), energy, 2)?;
        let least = self.binary("mul", &format!("{name}.least"), top, self.scalar(sparse.alpha))?;
        let low = self.binary("less", &format!("{name}.is_low"), energy, least)?;
        let low = self.cast(&format!("{name}.low"), low, self.float)?;
        let free = self.binary("sub", "free", self.scalar(1.0), bias.forced)?;
        let low = self.binary("mul", &format!("{name}.low_free"), low, free)?;
        let high = self.binary("sub", &format!("{name}.high"), self.scalar(1.0), low)?;
        let exact = self.binary("mul", &format!("{name}.exact"), picked.member, high)?;
        let low = self.fetch(&format!("{name}.low_chosen"), &picked, low, (choosers, choosers, 1))?;
        let low = self.binary("mul", &format!("{name}.low_bias"), low, self.scalar(OFF))?;
        let ones = self.constant("ones", &[1, 1, 1, sparse.block], vec![1.0; sparse.block]);
        let low = self.reshape(&format!("{name}.low_blocks"), low, &[1, choosers, sparse.budget, 1])?;
        let low = self.binary("mul", &format!("{name}.low_keys"), low, ones)?;
        let all = [1, choosers, sparse.budget * sparse.block, 1];
        Ok(Chosen { keys, exact, bias: Some(self.reshape(&format!("{name}.chosen_bias"), low, &all)?) })
    }

    /// The budget's best blocks by `topk`.
    fn best(
        &mut self,
        name: &str,
        sparse: Sparse,
        raised: ValueId,
        (choosers, blocks): (usize, usize),
    ) -> Result<Picked> {
        let budget = sparse.budget;
        let found = self.ops(
            "topk",
            &format!("{name}.best_blocks"),
            [
                ("x", raised.into()),
                ("k", size(budget).into()),
                ("axis", 2.into()),
                ("ascending", false.into()),
                ("sort", true.into()),
                ("return_indices", true.into()),
                ("output_indices_dtype", "uint16".into()),
            ],
        )?;
        let row = self.reshape(&format!("{name}.best_row"), found[1], &[1, choosers, 1, budget])?;
        let row = self.cast(&format!("{name}.best_float"), row, self.float)?;
        let all = self.counting("blocks", blocks);
        let hits = self.binary("equal", &format!("{name}.is_best"), row, all)?;
        let hits = self.cast(&format!("{name}.hits"), hits, self.float)?;
        let member = self.sum(&format!("{name}.chosen"), hits, 3)?;
        let ids = match choosers {
            1 => self.reshape(&format!("{name}.best_ids"), found[1], &[budget])?,
            _ => self.reshape(&format!("{name}.best_ids"), found[1], &[choosers, budget])?,
        };
        Ok(Picked { member, by: By::Ids(ids) })
    }

    /// The budget's best blocks by their ranks, of equals the first ones, as `topk` has it.
    fn ranked(
        &mut self,
        name: &str,
        sparse: Sparse,
        raised: ValueId,
        (choosers, blocks): (usize, usize),
    ) -> Result<Picked> {
        let budget = sparse.budget;
        let row = self.reshape(&format!("{name}.raised_row"), raised, &[1, choosers, 1, blocks])?;
        let above = self.binary("greater", &format!("{name}.is_above"), row, raised)?;
        let above = self.cast(&format!("{name}.above"), above, self.float)?;
        let level = self.binary("equal", &format!("{name}.is_level"), row, raised)?;
        let level = self.cast(&format!("{name}.level"), level, self.float)?;
        let before: Vec<f32> =
            (0..blocks).flat_map(|b| (0..blocks).map(move |c| if c < b { 1.0 } else { 0.0 })).collect();
        let before = self.constant("blocks before", &[1, 1, blocks, blocks], before);
        let level = self.binary("mul", &format!("{name}.level_before"), level, before)?;
        let ahead = self.binary("add", &format!("{name}.ahead"), above, level)?;
        let rank = self.sum(&format!("{name}.rank"), ahead, 3)?;
        #[expect(clippy::cast_precision_loss, reason = "few blocks")]
        let member = self.binary("less", &format!("{name}.is_chosen"), rank, self.scalar(budget as f32))?;
        let member = self.cast(&format!("{name}.chosen"), member, self.float)?;
        let rank = self.reshape(&format!("{name}.rank_row"), rank, &[1, choosers, 1, blocks])?;
        let places = self.counting("places", budget);
        let hits = self.binary("equal", &format!("{name}.is_place"), rank, places)?;
        let hits = self.cast(&format!("{name}.one_hot"), hits, self.float)?;
        Ok(Picked { member, by: By::OneHot(hits) })
    }

    /// The picked blocks of `[1, heads, blocks, width]`: `[1, heads, budget, width]` or `[heads, budget, width]`.
    fn fetch(
        &mut self,
        name: &str,
        picked: &Picked,
        x: ValueId,
        (choosers, heads, width): (usize, usize, usize),
    ) -> Result<ValueId> {
        let ids = match picked.by {
            By::OneHot(hits) => return self.matmul(&format!("{name}_blocks"), hits, x, false, false),
            By::Ids(ids) => ids,
        };
        let blocks = self.builder.shape(x)?[2];
        let x = self.reshape(&format!("{name}_from"), x, &[heads, blocks, width])?;
        let batch = i32::from(choosers > 1);
        self.op(
            "gather",
            &format!("{name}_blocks"),
            [
                ("x", x.into()),
                ("indices", ids.into()),
                ("axis", 1.into()),
                ("batch_dims", batch.into()),
                ("validate_indices", false.into()),
            ],
        )
    }

    /// 0, 1, 2 … as floats, `[1, 1, n, 1]`; fp16 holds them up to 2,048.
    #[expect(clippy::cast_precision_loss, reason = "few blocks")]
    fn counting(&self, name: &str, n: usize) -> In {
        self.constant(name, &[1, 1, n, 1], (0..n).map(|i| i as f32).collect())
    }

    fn sum(&mut self, name: &str, x: ValueId, axis: i32) -> Result<ValueId> {
        self.op("reduce_sum", name, [("x", x.into()), ("axes", [axis].into()), ("keep_dims", true.into())])
    }
}

/// The chosen blocks, and how to fetch them.
struct Picked {
    member: ValueId,
    by: By,
}

#[derive(Clone, Copy)]
enum By {
    /// `[budget]`, or `[H, budget]`
    Ids(ValueId),
    /// `[1, 1 or H, budget, blocks]`
    OneHot(ValueId),
}
