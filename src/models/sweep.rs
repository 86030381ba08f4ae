//! What prefill takes by chunk and tile: graphs are built and measured, nothing is estimated but time.

use serde_json::Value as Json;

use super::{
    Chunks, Plan, build,
    calls::{Attention, OPERAND_BYTES, Tiles},
};
use crate::{
    checkpoint::Checkpoint,
    error::Result,
    graph::Measure,
    mil::{Arg, Data, Function},
};

/// One way to prefill.
#[derive(Debug, Clone)]
pub struct Row {
    pub chunk: usize,
    /// Keys of a tile; none for dense attention.
    pub tile: Option<usize>,
    /// kv heads of an op.
    pub group: Option<usize>,
    pub measure: Measure,
    /// Bytes of weights that a call reads.
    pub weight_bytes: u64,
    /// Bytes of the cache that a call reads and writes.
    pub cache_bytes: u64,
    /// Bytes of the largest scores of an op.
    pub score_bytes: u64,
}

/// What binds, with microseconds for each token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Bound {
    pub compute: f64,
    pub weights: f64,
    pub memory: f64,
    pub call: f64,
}

/// Rates of a Neural Engine, to rank by and no more: the sources are measurements of single chips, and
/// what a graph reaches of the peak varies from 0.16 to 0.9 of it.
pub mod rates {
    /// Floating-point operations a second of fp16: a published peak of 18.6 TFLOPS (M4), of which
    /// whole networks through Core ML were seen to reach about a third.
    pub const FLOPS: f64 = 18.6e12 * 0.3;
    /// Bytes a second of weights that are streamed: 60 GB/s, as seen on M1 to M4.
    pub const WEIGHTS: f64 = 60e9;
    /// Bytes a second of results that do not fit on chip, and of the cache: 24 GB/s, as seen on M1 and M5.
    pub const MEMORY: f64 = 24e9;
    /// Seconds of a call: 0.13 ms.
    pub const CALL: f64 = 0.13e-3;
}

/// Chunks from 64 to 1,024 tokens with dense attention and tiles of 256 to 1,024 keys, for a context.
pub fn sweep(checkpoint: &Checkpoint, model_type: &str, context: usize, max_ops: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for chunk in [64, 128, 256, 512, 1024].into_iter().filter(|c| *c <= context) {
        for tile in [None, Some(256), Some(512), Some(1024)] {
            if tile.is_some_and(|t| t > context) {
                continue;
            }
            let attention = match tile {
                None => Attention::Dense,
                tile => Attention::Tiled(Tiles { tile, ..Tiles::default() }),
            };
            rows.push(row(checkpoint, model_type, (context, chunk), attention, max_ops)?);
        }
    }
    Ok(rows)
}

fn row(
    checkpoint: &Checkpoint,
    model_type: &str,
    (context, chunk): (usize, usize),
    attention: Attention,
    max_ops: usize,
) -> Result<Row> {
    let chunks =
        Chunks { contexts: vec![context], chunk: Some(chunk), attention, max_ops, ..Chunks::default() };
    let plan = Plan::language(chunks);
    let part = build(checkpoint, &plan, model_type)?.remove(0);
    let function = &part.program.functions["prefill"];
    let described = &part.contract["functions"]["prefill"]["attention"];
    let number = |v: &Json| v.as_u64().and_then(|n| usize::try_from(n).ok());
    let shape: Vec<u64> =
        part.contract["cache"]["shape"].as_array().into_iter().flatten().filter_map(Json::as_u64).collect();
    let slot: u64 = [0, 1, 3].iter().filter_map(|i| shape.get(*i)).product::<u64>() * 2;
    let scores = function.body.ops.iter().filter(|op| op.kind == "softmax");
    let bytes = |id: &crate::mil::ValueId| {
        function.ty(*id).as_tensor().and_then(crate::mil::TensorType::count).map_or(0, |n| 2 * n as u64)
    };
    Ok(Row {
        chunk,
        tile: number(&described["tile"]),
        group: number(&described["head_group"]),
        measure: Measure::of(function),
        weight_bytes: weights(function),
        cache_bytes: slot * (context + chunk) as u64,
        score_bytes: scores.flat_map(|op| &op.outputs).map(bytes).max().unwrap_or(0),
    })
}

fn weights(function: &Function) -> u64 {
    let mut seen = std::collections::BTreeMap::new();
    function.body.walk(&mut |op| {
        let consts = op.args().filter_map(|a| match a {
            Arg::Const(c) => Some(c),
            Arg::Value(_) => None,
        });
        for c in consts.chain(op.constant()) {
            if let Data::Weight(w) = &c.data {
                seen.insert(w.key.clone(), w.dtype.packed_len(w.count()).unwrap_or(0) as u64);
            }
        }
    });
    seen.values().sum()
}

impl Row {
    #[expect(clippy::cast_precision_loss, reason = "times are rough")]
    pub fn bound(&self) -> Bound {
        let each = |amount: u64, rate: f64| amount as f64 / rate / self.chunk as f64 * 1e6;
        Bound {
            compute: each(self.measure.flops, rates::FLOPS),
            weights: each(self.weight_bytes, rates::WEIGHTS),
            memory: each(self.measure.spilled_bytes + self.cache_bytes, rates::MEMORY),
            call: rates::CALL / self.chunk as f64 * 1e6,
        }
    }

    /// What speaks against this way, first.
    pub fn reason(&self, max_ops: usize) -> String {
        let b = self.bound();
        if self.measure.ops > max_ops {
            return format!("over {max_ops} ops");
        }
        if self.score_bytes > OPERAND_BYTES as u64 {
            return "scores leave the chip".into();
        }
        let least = b.compute.max(b.weights).max(b.memory);
        match least {
            v if v == b.weights => "bound by reading weights: larger chunks share them".into(),
            v if v == b.memory => "bound by memory: results that leave the chip, and the cache".into(),
            _ => "bound by compute".into(),
        }
    }
}
