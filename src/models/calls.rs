//! Which functions a decoder's package has, and how each of them attends to the cache.

use std::cmp::Ordering;

use crate::{
    bail,
    error::Result,
    nn::cache::{
        Form, Heads,
        sparse::{Gather, Scoring, Select, Sparse},
        tiled::Tiled,
    },
};

use super::Chunks;

/// How prefill attends to the cache.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Attention {
    /// Tiles for chunks over [`SMALL_CHUNK`] tokens, where the family allows it.
    Auto,
    Dense,
    Tiled(Tiles),
    Sparse(Sparse, Tiles),
}

/// Sizes of tiles, as far as they are given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tiles {
    pub tile: Option<usize>,
    /// kv heads of an op.
    pub group: Option<usize>,
    /// Whether a bucket's function counts on the slots of the next smaller bucket being filled.
    pub filled: bool,
}

/// Chunks up to this size are prefilled with dense attention unless told otherwise.
pub const SMALL_CHUNK: usize = 64;

/// What one operand may take on chip, in bytes.
#[expect(clippy::cast_possible_truncation, reason = "2 MiB")]
pub const OPERAND_BYTES: usize = crate::graph::measure::ON_CHIP as usize;

/// Settings that the published example uses, with a budget that suits contexts about 8,192.
pub const SPARSE: Sparse = Sparse {
    block: 128,
    budget: 16,
    sinks: 2,
    window: 3,
    alpha: 0.0,
    dense_layers: 4,
    gather: Gather::OneHot,
    select: Select::Layer,
    scoring: Scoring::Tile,
    correction: true,
};

/// Sizes of tiles that were not given.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Free {
    pub tile: bool,
    pub group: bool,
}

/// One function of a package.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Call {
    pub name: String,
    /// Tokens of a call; none for the function that pools anew.
    pub tokens: usize,
    /// Slots that it sees.
    pub context: usize,
    pub form: Form,
    /// What of the tiles is still to be chosen.
    pub free: Free,
    /// Positions at which it may begin.
    pub positions: (usize, usize),
    /// What positions have to be multiples of.
    pub align: usize,
}

/// All functions for the contexts, in ascending order, of which the last is the state's.
pub(super) fn calls(
    chunks: &Chunks,
    chunk: Option<usize>,
    contexts: &[usize],
    heads: Heads,
    alibi: bool,
) -> Result<Vec<Call>> {
    let capacity = contexts.last().copied().unwrap_or(0);
    let chunk = chunk.filter(|c| *c > 1);
    let attention = match (chunks.attention, chunk) {
        (Attention::Auto, Some(t)) if t > SMALL_CHUNK && !alibi => Attention::Tiled(Tiles::default()),
        (Attention::Auto, _) => Attention::Dense,
        (given, _) => given,
    };
    if chunk.is_none() && (!chunks.buckets.is_empty() || matches!(attention, Attention::Sparse(..))) {
        bail!("buckets or block-sparse attention are asked for, and no prefill"; hint: "`--prefill-chunk 256` makes it");
    }
    if !chunks.buckets.is_empty() && contexts.len() > 1 {
        bail!("several contexts and buckets are asked for"; hint: "`--buckets` makes functions for one `--context-length`");
    }
    if matches!(attention, Attention::Sparse(..)) && contexts.len() > 1 {
        bail!("block-sparse prefill is built for one context, {} are asked for", contexts.len());
    }
    let mut calls = Vec::new();
    for context in contexts {
        let suffix = if contexts.len() > 1 { format!("_{context}") } else { String::new() };
        calls.push(Call::dense(format!("decode{suffix}"), 1, *context));
        let Some(t) = chunk else { continue };
        for (bucket, below) in buckets(chunks, *context, t)? {
            let name = match bucket {
                Some(bucket) => format!("prefill_{bucket}"),
                None => format!("prefill{suffix}"),
            };
            let sees = bucket.unwrap_or(*context);
            calls.push(match attention {
                Attention::Auto | Attention::Dense => Call::dense(name, t, sees),
                Attention::Tiled(tiles) | Attention::Sparse(_, tiles) => {
                    Call::tiled(name, t, (sees, *context), tiles, if tiles.filled { below } else { 0 }, heads)
                }
            });
        }
    }
    if let (Attention::Sparse(sparse, tiles), Some(t)) = (attention, chunk) {
        check(sparse, capacity, t)?;
        let name = "prefill_sparse".to_string();
        let exact = Call::tiled(name, t, (capacity, capacity), tiles, 0, heads);
        let Form::Tiled(tiled) = exact.form else { bail!("no tiles") };
        let positions = (sparse.budget * sparse.block, capacity - t);
        calls.push(Call { form: Form::Sparse(sparse, tiled), positions, align: sparse.block, ..exact });
        calls.push(Call { tokens: 0, ..Call::dense("repool".into(), 1, capacity) });
    }
    Ok(calls)
}

impl Call {
    fn dense(name: String, tokens: usize, context: usize) -> Call {
        let positions = (0, context - tokens);
        let free = Free { tile: false, group: false };
        Call { name, tokens, context, form: Form::Dense, free, positions, align: 1 }
    }

    fn tiled(
        name: String,
        tokens: usize,
        (sees, context): (usize, usize),
        tiles: Tiles,
        filled: usize,
        heads: Heads,
    ) -> Call {
        let past = sees - tokens;
        let mut tiled = Tiled { past, tile: tiles.tile.unwrap_or(512), filled, group: 1 };
        // One head's scores fit; a tile that is asked for is taken as it is.
        while tiles.tile.is_none() && tiled.tile > 32 && tiled.score_bytes(heads, tokens) > OPERAND_BYTES {
            tiled.tile /= 2;
        }
        tiled.group = tiles.group.unwrap_or(1).clamp(1, heads.kv.max(1));
        Call {
            name,
            tokens,
            context,
            form: Form::Tiled(tiled),
            free: Free { tile: tiles.tile.is_none(), group: tiles.group.is_none() },
            positions: (filled, past),
            align: 1,
        }
    }

    /// The same with other tiles.
    fn with(&self, tiled: Tiled) -> Call {
        let form = match self.form {
            Form::Sparse(sparse, _) => Form::Sparse(sparse, tiled),
            _ => Form::Tiled(tiled),
        };
        Call { form, ..self.clone() }
    }

    /// The function in all sizes of tiles that were left open and whose scores fit on chip: those with the
    /// fewest heads first, then those with the shortest tiles from the usual one on, then shorter ones. The first
    /// is taken that has few enough ops.
    pub(super) fn candidates(&self, heads: Heads) -> Vec<Call> {
        let (Form::Tiled(first) | Form::Sparse(_, first)) = self.form else { return vec![self.clone()] };
        let mut groups: Vec<usize> = (1..=heads.kv).map(|count| heads.kv.div_ceil(count)).collect();
        groups.sort_unstable();
        groups.dedup();
        if !self.free.group {
            groups = vec![first.group];
        }
        // Shorter ones are for more heads, of which longer ones do not fit.
        let tiles = [first.tile, first.tile * 2, first.tile * 4, first.tile / 2, first.tile / 4];
        let tiles = &tiles[..if self.free.tile { 5 } else { 1 }];
        let all = groups
            .iter()
            .flat_map(|group| tiles.iter().map(|tile| Tiled { group: *group, tile: *tile, ..first }));
        let fits = |t: &Tiled| *t == first || t.score_bytes(heads, self.tokens) <= OPERAND_BYTES;
        // A tile longer than all there is would be the same again.
        let useful = |t: &Tiled| match t.tile.cmp(&first.tile) {
            Ordering::Less => t.group > first.group && t.tile >= 32,
            Ordering::Equal => true,
            Ordering::Greater => t.tile < 2 * t.past,
        };
        let found: Vec<Call> = all.filter(|t| fits(t) && useful(t)).map(|t| self.with(t)).collect();
        if found.is_empty() { vec![self.clone()] } else { found }
    }
}

/// Buckets with the one below each; one without a name where none are asked for.
fn buckets(chunks: &Chunks, context: usize, chunk: usize) -> Result<Vec<(Option<usize>, usize)>> {
    if chunks.buckets.is_empty() {
        return Ok(vec![(None, 0)]);
    }
    let mut sizes = chunks.buckets.clone();
    sizes.sort_unstable();
    sizes.dedup();
    if let Some(bad) = sizes.iter().find(|b| **b < chunk || **b > context || *b % 32 != 0) {
        bail!(
            "a bucket of {bad} tokens is asked for, multiples of 32 from the chunk's {chunk} to the context's {context} are possible"
        );
    }
    if sizes.last() != Some(&context) {
        sizes.push(context);
    }
    Ok(sizes.iter().enumerate().map(|(i, b)| (Some(*b), if i == 0 { 0 } else { sizes[i - 1] })).collect())
}

fn check(sparse: Sparse, capacity: usize, chunk: usize) -> Result<()> {
    let Sparse { block, budget, sinks, window, .. } = sparse;
    if block == 0 || !capacity.is_multiple_of(block) || !chunk.is_multiple_of(block) {
        bail!(
            "blocks of {block} keys are asked for, which have to divide the context of {capacity} and the chunk of {chunk}"
        );
    }
    if budget < sinks + window || budget == 0 {
        bail!("a budget of {budget} blocks does not hold {sinks} sinks and a window of {window}");
    }
    if budget * block + chunk > capacity {
        bail!(
            "a budget of {budget} blocks of {block} keys and a chunk of {chunk} is more than the context of {capacity}";
            hint: "block-sparse prefill pays off in long contexts, such as `--context-length 8192`"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tiles of a function are tried in an order in which each op stays on chip and ops become fewer.
    #[test]
    fn more_heads_come_with_shorter_tiles_where_longer_ones_do_not_fit() {
        let heads = Heads { query: 9, kv: 3, dim: 64, padded: 64 };
        let sizes = |tiles: Tiles| -> Vec<(usize, usize)> {
            let call = Call::tiled("prefill".into(), 256, (8192, 8192), tiles, 0, heads);
            let tiled = |call: Call| match call.form {
                Form::Tiled(t) => t,
                other => panic!("{other:?}"),
            };
            let found: Vec<Tiled> = call.candidates(heads).into_iter().map(tiled).collect();
            assert!(found.iter().all(|t| t.score_bytes(heads, 256) <= OPERAND_BYTES), "{found:?}");
            found.iter().map(|t| (t.group, t.tile)).collect()
        };
        assert_eq!(
            sizes(Tiles::default()),
            [(1, 512), (1, 1024), (2, 512), (2, 256), (2, 128), (3, 256), (3, 128)]
        );
        assert_eq!(sizes(Tiles { tile: Some(256), ..Tiles::default() }), [(1, 256), (2, 256), (3, 256)]);
        assert_eq!(sizes(Tiles { group: Some(1), ..Tiles::default() }), [(1, 512), (1, 1024)]);
    }
}
