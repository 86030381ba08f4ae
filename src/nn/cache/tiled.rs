//! Exact attention, one tile of keys at a time.
//!
//! Past keys come from the cache in tiles, the new ones from their projections under a constant triangle,
//! so that no mask of past times new slots exists: a vector says which past slots are filled. The G query
//! heads of a kv head lie side by side on the query axis, W = G · T columns, and nothing is repeated.
//! Each tile is normalised on its own, and all are merged by the largest score m and the largest weight
//! p = 1 / Σ exp(s − m) of each tile t:
//!
//! ```text
//! s = K q + bias         [1, g, keys, W]       p = softmax(s)       o = Vᵀ p  [1, g, D, W]
//! c_t = exp(m_t − max m) / p_t                 O = Σ c_t o_t / Σ c_t
//! ```
//!
//! What a tile's softmax loses to flushed subnormals is small beside that tile's own largest weight,
//! where a softmax over thousands of keys would lose most of its weights.

use std::ops::Range;

use super::{
    Heads,
    masks::{blocking, iota},
    size,
    store::{Store, first, moving, per_row},
};
use crate::{
    error::{Error, Result},
    graph::In,
    mil::{ValueId, Weight},
    nn::{Net, attention::BLOCKED},
};

/// Sizes of a function's tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiled {
    /// Slots before the new tokens that the function may see.
    pub past: usize,
    /// Keys of a tile; the last one may be shorter.
    pub tile: usize,
    /// So many first slots are filled whenever the function is called.
    pub filled: usize,
    /// kv heads of an op.
    pub group: usize,
}

/// What the tiles of layers of one kind share.
pub(super) struct Tiles {
    group: usize,
    /// The new keys, with `[1, 1, keys, W]` each.
    new: Vec<(Range<usize>, Weight)>,
    past: Vec<Tile>,
    /// Where a window's past slots begin in each row of the cache, and how many there are.
    window: Option<(Vec<ValueId>, usize)>,
}

struct Tile {
    slots: Range<usize>,
    /// `[1, 1, keys, 1]` or `[1, 1, keys, W]`; none where all is seen.
    bias: Option<ValueId>,
}

/// What a layer brings: queries `[query heads, D, 1, T]`, keys and values `[1, H, T, D]`.
pub(super) struct New {
    pub q: ValueId,
    pub k: ValueId,
    pub v: ValueId,
    pub cap: Option<f32>,
}

/// Keys and values `[1, g, keys, D]` of one tile.
pub(super) struct Keys {
    pub k: ValueId,
    pub v: ValueId,
    pub bias: Option<In>,
}

impl Tiles {
    /// Makes the biases of kind `i`. With `runtime` slices, a window's layers read only their window.
    pub(super) fn prepare(
        n: &mut Net<'_>,
        form: Tiled,
        heads: Heads,
        (i, window): (usize, Option<usize>),
        rows: usize,
        position_ids: ValueId,
        runtime: bool,
    ) -> Result<Tiles> {
        let (t, past) = (n.tokens, form.past);
        let window = window.filter(|w| *w < past + t);
        let mut tiles = Tiles {
            group: form.group,
            new: cut(t, form.tile)
                .map(|keys| (keys.clone(), triangle(n, heads.group(), window, keys)))
                .collect(),
            past: Vec::new(),
            window: None,
        };
        if past == 0 {
            return Ok(tiles);
        }
        let pos = first(n, &format!("past_{i}_position"), position_ids)?;
        let reach = window.map_or(past, |w| (w.max(1) - 1).next_multiple_of(32).min(past));
        let mut slots = iota(reach, &[1, 1, reach, 1]);
        let mut filled = form.filled;
        if runtime && reach < past {
            filled = 0;
            let from = n.binary("sub", &format!("window_{i}_from"), pos, size(reach))?;
            let from = n.binary("maximum", &format!("window_{i}_begin"), from, 0)?;
            let moving = moving(n, &format!("window_{i}_in_rows"), rows, from)?;
            let begins = per_row(n, &format!("window_{i}_begins"), rows, moving, &|r| [r, 0, 0, 0])?;
            slots = n.binary("add", &format!("window_{i}_slots"), slots, from)?.into();
            tiles.window = Some((begins, reach));
        } else if reach < past {
            slots = iota(past, &[1, 1, past, 1]);
        }
        let seen = n.binary("less", &format!("past_{i}_filled"), slots.clone(), pos)?;
        let bias = match window {
            None => blocking(n, &format!("past_{i}"), seen)?,
            Some(w) => {
                let at = n.reshape(&format!("window_{i}_positions"), position_ids, &[1, 1, 1, t])?;
                let oldest = n.binary("sub", &format!("window_{i}_oldest"), at, size(w))?;
                let near = n.binary("greater", &format!("window_{i}_near"), slots, oldest)?;
                let seen = n.binary("logical_and", &format!("window_{i}_seen"), near, seen)?;
                let bias = blocking(n, &format!("past_{i}"), seen)?;
                let groups = vec![bias; heads.group()];
                n.join(&format!("past_{i}_columns"), &groups, 3)?
            }
        };
        let [.., all, width] = n.builder.shape(bias)?[..] else {
            return Err(Error::new("a bias has no keys"));
        };
        for slots in cut(all, form.tile) {
            let start = slots.start;
            let bias = (slots.end > filled).then(|| {
                let of = [1, 1, slots.len(), width];
                n.slice(&format!("past_{i}_from_{start}"), bias, &[0, 0, start, 0], &of)
            });
            tiles.past.push(Tile { slots, bias: bias.transpose()? });
        }
        Ok(tiles)
    }
}

impl Net<'_> {
    /// Attention of one layer, whose rows of the cache are those of its keys and values; gives the query
    /// heads' channels in order.
    pub(super) fn tiled_attention(
        &mut self,
        name: &str,
        h: Heads,
        cache: &Store,
        tiles: &Tiles,
        (k_row, v_row): (usize, usize),
        new: New,
    ) -> Result<ValueId> {
        let windows = match &tiles.window {
            Some((begins, reach)) => Some([
                cache.slots_from(self, &format!("{name}.k_window"), begins[k_row], *reach)?,
                cache.slots_from(self, &format!("{name}.v_window"), begins[v_row], *reach)?,
            ]),
            None => None,
        };
        let q = self.packed(name, h, new.q)?;
        let mut parts = Vec::new();
        for (place, heads, [q, k, v]) in self.grouped(name, h, tiles.group, [q, new.k, new.v])? {
            let mut merge = Merge::new(q, new.cap, tiles.new.len() + tiles.past.len() == 1);
            self.add_new(&place, &mut merge, tiles, (heads.len(), h.padded), (k, v))?;
            for tile in &tiles.past {
                let at = format!("{place}.past_{}", tile.slots.start);
                let mut cut = |of: &str, i: usize, row: usize| -> Result<ValueId> {
                    let name = format!("{at}_{of}");
                    let held = match windows {
                        Some(windows) => {
                            let size = [1, heads.len(), tile.slots.len(), h.padded];
                            self.slice(&name, windows[i], &[0, heads.start, tile.slots.start, 0], &size)?
                        }
                        None => cache.slots(self, &name, row, heads.clone(), tile.slots.clone())?,
                    };
                    self.cast(&format!("{name}_float"), held, self.float)
                };
                let keys =
                    Keys { k: cut("k", 0, k_row)?, v: cut("v", 1, v_row)?, bias: tile.bias.map(In::from) };
                merge.add(self, &at, keys)?;
            }
            parts.push(merge.finish(self, &place)?);
        }
        let y = self.join(&format!("{name}.groups"), &parts, 1)?;
        self.unpacked(name, h, y)
    }

    /// Takes the new keys and values `[1, g, T, D]`, which are seen up to each query.
    pub(super) fn add_new(
        &mut self,
        place: &str,
        merge: &mut Merge,
        tiles: &Tiles,
        (group, dim): (usize, usize),
        (k, v): (ValueId, ValueId),
    ) -> Result<()> {
        for (keys, triangle) in &tiles.new {
            let at = format!("{place}.new_{}", keys.start);
            let (begin, of) = ([0, 0, keys.start, 0], [1, group, keys.len(), dim]);
            let k = self.slice(&format!("{at}_k"), k, &begin, &of)?;
            let v = self.slice(&format!("{at}_v"), v, &begin, &of)?;
            merge.add(self, &at, Keys { k, v, bias: Some(triangle.clone().into()) })?;
        }
        Ok(())
    }

    /// Query heads `[H · G, D, 1, T]` side by side: `[1, H, D, G · T]`.
    pub(super) fn packed(&mut self, name: &str, h: Heads, q: ValueId) -> Result<ValueId> {
        let (g, t) = (h.group(), self.tokens);
        let mut q = q;
        if g > 1 {
            q = self.reshape(&format!("{name}.q_heads"), q, &[h.kv, g, h.padded, t])?;
            q = self.op(
                "transpose",
                &format!("{name}.q_beside"),
                [("x", q.into()), ("perm", [0, 2, 1, 3].into())],
            )?;
        }
        self.reshape(&format!("{name}.q_columns"), q, &[1, h.kv, h.padded, g * t])
    }

    /// The way back from [`Net::packed`]: `[H, G, D, T]`, channels of the query heads in order.
    pub(super) fn unpacked(&mut self, name: &str, h: Heads, y: ValueId) -> Result<ValueId> {
        let (g, t) = (h.group(), self.tokens);
        if g == 1 {
            return Ok(y);
        }
        let y = self.reshape(&format!("{name}.out_columns"), y, &[h.kv, h.padded, g, t])?;
        self.op("transpose", &format!("{name}.out_heads"), [("x", y.into()), ("perm", [0, 2, 1, 3].into())])
    }

    /// Tensors of all kv heads `[1, H, …]`, cut into groups of heads.
    #[expect(clippy::type_complexity, reason = "place, heads, and the pieces in the order given")]
    pub(super) fn grouped<const N: usize>(
        &mut self,
        name: &str,
        h: Heads,
        group: usize,
        tensors: [ValueId; N],
    ) -> Result<Vec<(String, Range<usize>, [ValueId; N])>> {
        let group = group.clamp(1, h.kv);
        if group == h.kv {
            return Ok(vec![(name.into(), 0..h.kv, tensors)]);
        }
        let ranges: Vec<Range<usize>> =
            (0..h.kv).step_by(group).map(|start| start..(start + group).min(h.kv)).collect();
        let sizes: Vec<i32> = ranges.iter().map(|r| size(r.len())).collect();
        let mut pieces = Vec::new();
        for (i, x) in tensors.into_iter().enumerate() {
            pieces.push(self.ops(
                "split",
                &format!("{name}.groups_of_{i}"),
                [("x", x.into()), ("split_sizes", In::from(sizes.as_slice())), ("axis", 1.into())],
            )?);
        }
        let place = |r: &Range<usize>| format!("{name}.heads_{}", r.start);
        Ok(ranges
            .iter()
            .enumerate()
            .map(|(g, r)| (place(r), r.clone(), std::array::from_fn(|i| pieces[i][g])))
            .collect())
    }

    /// Values joined along an axis.
    pub(super) fn join(&mut self, name: &str, values: &[ValueId], axis: i32) -> Result<ValueId> {
        match values {
            [one] => Ok(*one),
            _ => self.op("concat", name, [("values", In::from(values)), ("axis", axis.into())]),
        }
    }

    pub(super) fn largest(&mut self, name: &str, x: ValueId, axis: i32) -> Result<ValueId> {
        self.op("reduce_max", name, [("x", x.into()), ("axes", [axis].into()), ("keep_dims", true.into())])
    }
}

/// Tiles on their way to one result.
pub(super) struct Merge {
    q: ValueId,
    cap: Option<f32>,
    /// There is no other tile.
    alone: bool,
    /// Result, largest score, largest weight of each tile.
    tiles: Vec<(ValueId, Option<(ValueId, ValueId)>)>,
    rounds: usize,
}

impl Merge {
    /// For queries `[1, g, D, W]`.
    pub(super) fn new(q: ValueId, cap: Option<f32>, alone: bool) -> Merge {
        Merge { q, cap, alone, tiles: Vec::new(), rounds: 0 }
    }

    /// Takes a tile. So that few results wait at a time, eight are merged into one.
    pub(super) fn add(&mut self, n: &mut Net<'_>, name: &str, keys: Keys) -> Result<()> {
        let s = n.matmul(&format!("{name}_scores"), keys.k, self.q, false, false)?;
        let s = n.capped(name, s, self.cap)?;
        self.add_scores(n, name, s, keys.bias, keys.v)
    }

    /// Takes a tile of which the scores `[1, g, keys, W]` are there.
    pub(super) fn add_scores(
        &mut self,
        n: &mut Net<'_>,
        name: &str,
        mut s: ValueId,
        bias: Option<In>,
        v: ValueId,
    ) -> Result<()> {
        if let Some(bias) = bias {
            s = n.binary("add", &format!("{name}_masked"), s, bias)?;
        }
        let p = n.op("softmax", &format!("{name}_weights"), [("x", s.into()), ("axis", 2.into())])?;
        let o = n.matmul(&format!("{name}_values"), v, p, true, false)?;
        let tops = match self.alone {
            true => None,
            false => {
                Some((n.largest(&format!("{name}_top"), s, 2)?, n.largest(&format!("{name}_share"), p, 2)?))
            }
        };
        self.tiles.push((o, tops));
        if self.tiles.len() == 8 {
            self.rounds += 1;
            let merged = self.merge(n, &format!("{name}_round_{}", self.rounds), false)?;
            self.tiles.push(merged);
        }
        Ok(())
    }

    /// The attention over all tiles, `[1, g, D, W]`.
    pub(super) fn finish(mut self, n: &mut Net<'_>, place: &str) -> Result<ValueId> {
        Ok(self.merge(n, &format!("{place}.merged"), true)?.0)
    }

    fn merge(
        &mut self,
        n: &mut Net<'_>,
        name: &str,
        last: bool,
    ) -> Result<(ValueId, Option<(ValueId, ValueId)>)> {
        let tiles = std::mem::take(&mut self.tiles);
        if let [only] = tiles[..] {
            return Ok(only);
        }
        let tops: Vec<(ValueId, ValueId)> = tiles.iter().filter_map(|t| t.1).collect();
        let (m, p): (Vec<ValueId>, Vec<ValueId>) = tops.into_iter().unzip();
        let (m, p) = (n.join(&format!("{name}_tops"), &m, 2)?, n.join(&format!("{name}_shares"), &p, 2)?);
        let top = n.largest(&format!("{name}_top"), m, 2)?;
        let below = n.binary("sub", &format!("{name}_below"), m, top)?;
        let e = n.op("exp", &format!("{name}_exp"), [("x", below.into())])?;
        let c = n.binary("real_div", &format!("{name}_mass"), e, p)?;
        let total = n.op(
            "reduce_sum",
            &format!("{name}_total"),
            [("x", c.into()), ("axes", [2].into()), ("keep_dims", true.into())],
        )?;
        let w = n.binary("real_div", &format!("{name}_weights"), c, total)?;
        let weights = n.split_channels(&format!("{name}_weight"), w, 2, tiles.len())?;
        let mut sum = None;
        for (i, ((o, _), w)) in tiles.iter().zip(weights).enumerate() {
            let term = n.binary("mul", &format!("{name}_term_{i}"), *o, w)?;
            sum = Some(match sum {
                None => term,
                Some(sum) => n.binary("add", &format!("{name}_sum_{i}"), sum, term)?,
            });
        }
        let Some(sum) = sum else { return Err(Error::new("there is no tile to merge")) };
        // Eight shares sum up to one: the largest weight of all is that of the total.
        let tops = match last {
            true => None,
            false => Some((top, n.binary("real_div", &format!("{name}_share"), n.scalar(1.0), total)?)),
        };
        Ok((sum, tops))
    }
}

/// Ranges of `tile`, the last one shorter.
pub(super) fn cut(all: usize, tile: usize) -> impl Iterator<Item = Range<usize>> {
    (0..all).step_by(tile.max(1)).map(move |start| start..(start + tile).min(all))
}

/// Which of some new keys each column sees: those up to itself, inside the window.
fn triangle(n: &Net<'_>, group: usize, window: Option<usize>, keys: Range<usize>) -> Weight {
    let t = n.tokens;
    let window = window.unwrap_or(t);
    let key = format!("triangle {keys:?} of {t} × {group}, {window} wide");
    n.constant_later(&key, &[1, 1, keys.len(), group * t], move || {
        let seen = |k: usize, q: usize| k <= q && q - k < window;
        let row = |k: usize| (0..group * t).map(move |c| if seen(k, c % t) { 0.0 } else { BLOCKED });
        keys.clone().flat_map(row).collect()
    })
}

impl Tiled {
    /// Bytes of one op's scores in fp16, for chunks of `tokens`.
    pub fn score_bytes(&self, heads: Heads, tokens: usize) -> usize {
        self.group * self.tile.min(self.past.max(tokens)) * heads.group() * tokens * 2
    }
}
