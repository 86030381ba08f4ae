//! `silane inspect --sweep`: what prefill of a language model takes, by chunk and tile.

use std::path::Path;

use serde_json::json;

use super::{Answer, print_json};
use crate::{
    checkpoint::Checkpoint,
    error::{Error, Result},
    models::{
        decoder::MAX_OPS,
        sweep::{Row, rates, sweep},
    },
    ui,
};

pub(super) fn run(folder: &Path, context: usize, as_json: bool) -> Result<Answer> {
    let name = folder.to_str().ok_or_else(|| Error::new("the path is not Unicode"))?;
    let checkpoint = Checkpoint::open(name)?;
    let model_type = checkpoint.config.model_type()?;
    let rows = sweep(&checkpoint, model_type, context, MAX_OPS)?;
    if as_json {
        print_json(&json!({
            "model_type": model_type,
            "context": context,
            "rates": {
                "flops_per_second": rates::FLOPS, "weight_bytes_per_second": rates::WEIGHTS,
                "memory_bytes_per_second": rates::MEMORY, "seconds_per_call": rates::CALL,
            },
            "rows": rows.iter().map(json).collect::<Vec<_>>(),
        }))?;
    } else {
        ui::data(table(model_type, context, &rows));
    }
    Ok(Answer::Yes)
}

#[expect(clippy::cast_precision_loss, reason = "shown with few digits")]
fn table(model_type: &str, context: usize, rows: &[Row]) -> String {
    let mut text = format!(
        "prefill of {model_type} at the end of a context of {context} tokens, by tokens of a call and keys of a tile\n\n\
         chunk   tile  heads    ops   GFLOP  peak MiB  scores MiB  cache MiB  µs/token\n"
    );
    for row in rows {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let b = row.bound();
        let shown = |n: Option<usize>| n.map_or_else(|| "-".into(), |n| n.to_string());
        text.push_str(&format!(
            "{:>5}  {:>5}  {:>5}  {:>5}  {:>6.1}  {:>8.1}  {:>10.2}  {:>9.1}  {:>8.0}  {}\n",
            row.chunk,
            row.tile.map_or_else(|| "dense".into(), |t| t.to_string()),
            shown(row.group),
            row.measure.ops,
            row.measure.flops as f64 / 1e9,
            mib(row.measure.peak_bytes),
            mib(row.score_bytes),
            mib(row.cache_bytes),
            b.compute.max(b.weights).max(b.memory) + b.call,
            row.reason(MAX_OPS)
        ));
    }
    text.push_str(&format!(
        "\ncounts and bytes are those of the graphs; µs/token only ranks them, at {:.1} TFLOPS, {:.0} GB/s of weights, \
         {:.0} GB/s of memory and {:.2} ms a call, from measurements of single chips",
        rates::FLOPS / 1e12,
        rates::WEIGHTS / 1e9,
        rates::MEMORY / 1e9,
        rates::CALL * 1e3
    ));
    text
}

fn json(row: &Row) -> serde_json::Value {
    let b = row.bound();
    json!({
        "chunk": row.chunk, "tile": row.tile, "head_group": row.group, "ops": row.measure.ops,
        "flops": row.measure.flops, "attention_flops": row.measure.attention_flops,
        "peak_bytes": row.measure.peak_bytes, "spilled_bytes": row.measure.spilled_bytes,
        "score_bytes": row.score_bytes, "cache_bytes": row.cache_bytes, "weight_bytes": row.weight_bytes,
        "microseconds_per_token": { "compute": b.compute, "weights": b.weights, "memory": b.memory, "call": b.call },
        "reason": row.reason(MAX_OPS),
    })
}
