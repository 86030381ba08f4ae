//! Prefill of a language model in its three forms, in one run:
//!
//! ```text
//! cargo bench --bench prefill -- CHECKPOINT exact    tiles against dense attention and the reference
//! cargo bench --bench prefill -- CHECKPOINT speed    seconds, operations and memory by context
//! cargo bench --bench prefill -- CHECKPOINT sparse   block-sparse attention by budget
//! ```
//!
//! The text is `benches/text/moby-dick.txt`. `CONTEXTS=2048,4096` limits the contexts, `BUDGETS=8,16` the budgets;
//! `EVERY=4` times every fourth chunk and counts it four times, as all chunks of a function take equally long.
#![expect(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::cast_precision_loss,
    reason = "a bench reports, and fails by panicking"
)]

use std::{collections::BTreeMap, io::Write, time::Instant};

use silane::{
    checkpoint::{Checkpoint, Tokenizer},
    graph::Measure,
    interp::{Machine, Precision, States, compare::compare},
    mil::{DType, Program},
    models::{
        self, Chunks, Logits, Plan,
        calls::{Attention, SPARSE, Tiles},
    },
    nn::cache::sparse::{Gather, Select, Sparse},
    ops::Val,
    passes,
    reference::Decoder,
};

const CHUNK: usize = 256;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let [folder, what] = &args[..] else {
        println!("prefill: give a checkpoint's folder and one of exact, speed, sparse; nothing was measured");
        return;
    };
    let checkpoint = Checkpoint::open(folder).unwrap();
    let text =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/benches/text/moby-dick.txt")).unwrap();
    let ids = Tokenizer::open(&checkpoint.dir).unwrap().encode(&text).unwrap().ids;
    let ids: Vec<i64> = ids.into_iter().map(i64::from).collect();
    match what.as_str() {
        "exact" => exact(&checkpoint, &ids),
        "speed" => speed(&checkpoint, &ids),
        "sparse" => sparse(&checkpoint, &ids),
        other => println!("prefill: `{other}` is none of exact, speed, sparse"),
    }
}

fn contexts(all: &[usize]) -> Vec<usize> {
    match std::env::var("CONTEXTS") {
        Ok(given) => given.split(',').map(|n| n.parse().unwrap()).collect(),
        Err(_) => all.to_vec(),
    }
}

fn program(
    checkpoint: &Checkpoint,
    attention: Attention,
    context: usize,
    float: DType,
    logits: Logits,
) -> Program {
    let chunks =
        Chunks { contexts: vec![context], chunk: Some(CHUNK), logits, attention, ..Chunks::default() };
    let plan = Plan { float, ..Plan::language(chunks) };
    let part = models::build(checkpoint, &plan, checkpoint.config.model_type().unwrap()).unwrap().remove(0);
    part.notes.iter().for_each(|note| println!("note: {note}"));
    let mut program = part.program;
    passes::tidy(&mut program).unwrap();
    program
}

/// A prompt on its way.
struct Session<'a> {
    machine: Machine<'a>,
    states: States,
}

impl<'a> Session<'a> {
    fn new(program: &'a Program, precision: Precision) -> Self {
        let machine = Machine::new(program, precision);
        let states = machine.states("decode").unwrap();
        Session { machine, states }
    }

    /// The logits of all tokens of a chunk.
    fn chunk(&mut self, function: &str, ids: &[i64], position: usize) -> Vec<f32> {
        let inputs = inputs(ids, position);
        let outputs = self.machine.run(function, &inputs, &mut self.states, None).unwrap();
        outputs.into_values().next().unwrap().to_floats().unwrap()
    }
}

fn inputs(ids: &[i64], position: usize) -> BTreeMap<String, Val> {
    let n = ids.len();
    let positions = (0..n).map(|i| i64::try_from(position + i).unwrap()).collect();
    BTreeMap::from([
        ("input_ids".to_string(), Val::ints(ids.to_vec(), &[1, n]).unwrap()),
        ("position_ids".to_string(), Val::ints(positions, &[1, n]).unwrap()),
    ])
}

/// Which function takes the chunk at `position` of a prompt of `length` tokens.
fn function(sparse: Option<Sparse>, position: usize, length: usize) -> &'static str {
    match sparse {
        Some(s) if position >= s.budget * s.block && position + 2 * CHUNK <= length => "prefill_sparse",
        _ => "prefill",
    }
}

/// Logits of the last chunk of prompts of several lengths, over several passages of the text: one passage alone says
/// little, as the rounding of everything else moves its error by half a decibel.
fn exact(checkpoint: &Checkpoint, ids: &[i64]) {
    let lengths = contexts(&[256, 512, 1024, 2048, 4096]);
    println!("errors of all logits of the last chunk, as shares of their spread; passages of the text\n");
    println!("{:>6} {:>8} {:>22} {:>12} {:>12} {:>12}", "tokens", "passages", "", "max", "rms", "PSNR");
    let decoder = Decoder::open(checkpoint).unwrap();
    for length in lengths {
        let passages = (4096 / length).clamp(1, 4);
        let step = (ids.len() - length) / passages;
        let mut table: Vec<(String, f64, f64)> = Vec::new();
        for passage in 0..passages {
            let ids = &ids[passage * step..][..length];
            let row: Vec<u32> = ids.iter().map(|i| u32::try_from(*i).unwrap()).collect();
            let logits = decoder.forward(&[row], None).unwrap().logits.squeeze(0).unwrap();
            let reference = logits.narrow(0, length - CHUNK, CHUNK).unwrap().flatten_all().unwrap();
            let reference: Vec<f32> = reference.to_vec1().unwrap();
            drop(logits);
            let run = |attention, float, precision| {
                let program = program(checkpoint, attention, length, float, Logits::All);
                let mut session = Session::new(&program, precision);
                let mut last = Vec::new();
                for position in (0..length).step_by(CHUNK) {
                    last = session.chunk("prefill", &ids[position..position + CHUNK], position);
                }
                last
            };
            let tiled = Attention::Tiled(Tiles::default());
            let mut errors = Vec::new();
            let mut note = |what: String, seen: &[f32], expected: &[f32]| {
                let c = compare(seen, expected, 0.0).unwrap();
                errors.push((what, c.relative(), 10f64.powf(-c.psnr / 10.0)));
            };
            if passage == 0 {
                let dense32 = run(Attention::Dense, DType::F32, Precision::Fp32);
                let tiled32 = run(tiled, DType::F32, Precision::Fp32);
                note("fp32 tiled, dense".into(), &tiled32, &dense32);
                note("fp32 tiled, reference".into(), &tiled32, &reference);
            }
            for precision in [Precision::Fp16, Precision::Fp16Flush] {
                for (name, attention) in [("dense", Attention::Dense), ("tiled", tiled)] {
                    let seen = run(attention, DType::F16, precision);
                    note(format!("{precision:?} {name}"), &seen, &reference);
                }
            }
            for (what, max, square) in errors {
                match table.iter_mut().find(|row| row.0 == what) {
                    Some(row) => *row = (what, row.1.max(max), row.2 + square),
                    None => table.push((what, max, square)),
                }
            }
        }
        for (what, max, squares) in table {
            let n = if what.starts_with("fp32") { 1 } else { passages };
            let mean = squares / n as f64;
            println!(
                "{length:>6} {n:>8} {what:>22} {max:>12.2e} {:>12.2e} {:>9.1} dB",
                mean.sqrt(),
                -10.0 * mean.log10()
            );
        }
        std::io::stdout().flush().unwrap();
    }
}

fn speed(checkpoint: &Checkpoint, ids: &[i64]) {
    println!(
        "{:>7} {:<26} {:>9} {:>11} {:>13} {:>13} {:>12} {:>7}",
        "context", "form", "prefill s", "last full s", "GFLOP", "attn GFLOP", "peak MiB", "ops"
    );
    let indexed = Sparse { gather: Gather::Index, ..SPARSE };
    let every: usize = std::env::var("EVERY").map_or(1, |n| n.parse().unwrap());
    if every > 1 {
        println!("every {every}th chunk was timed");
    }
    for context in contexts(&[2048, 4096, 8192]) {
        for (name, attention, sparse) in [
            ("dense", Attention::Dense, None),
            ("tiled", Attention::Tiled(Tiles::default()), None),
            ("block-sparse, index", Attention::Sparse(indexed, Tiles::default()), Some(indexed)),
            ("block-sparse, one-hot", Attention::Sparse(SPARSE, Tiles::default()), Some(SPARSE)),
        ] {
            if sparse.is_some_and(|s| s.budget * s.block + 2 * CHUNK > context) {
                println!("{context:>7} {name:<26} the budget is the whole context");
                continue;
            }
            let program = program(checkpoint, attention, context, DType::F16, Logits::Last);
            let mut session = Session::new(&program, Precision::Fp16);
            // Weights are decoded at their first use.
            session.chunk("prefill", &ids[..CHUNK], 0);
            if sparse.is_some() {
                session.chunk("prefill_sparse", &ids[..CHUNK], 0);
            }
            session.states = session.machine.states("decode").unwrap();
            let (mut total, mut last, mut flops, mut attention_flops) = (0.0, 0.0, 0, 0);
            for (i, position) in (0..context).step_by(CHUNK).enumerate() {
                let function = function(sparse, position, context);
                let measure = Measure::of(&program.functions[function]);
                flops += measure.flops;
                attention_flops += measure.attention_flops;
                // One in the middle of as many, so that chunks that are exact in each form count by their number.
                if i % every != every / 2 {
                    continue;
                }
                let start = Instant::now();
                session.chunk(function, &ids[position..position + CHUNK], position);
                let took = start.elapsed().as_secs_f64();
                total += took * every as f64;
                if position + 2 * CHUNK <= context {
                    last = took;
                }
            }
            let function = if sparse.is_some() { "prefill_sparse" } else { "prefill" };
            let measure = Measure::of(&program.functions[function]);
            println!(
                "{context:>7} {name:<26} {total:>9.1} {last:>11.2} {:>13.1} {:>13.1} {:>12.1} {:>7}",
                flops as f64 / 1e9,
                attention_flops as f64 / 1e9,
                measure.peak_bytes as f64 / 1048576.0,
                measure.ops
            );
            std::io::stdout().flush().unwrap();
        }
    }
}

/// Next-token logits of the last quarter of a long text, of which the rest is in the cache exactly: blocks
/// against tiles, by budget.
fn sparse(checkpoint: &Checkpoint, ids: &[i64]) {
    let context = contexts(&[8192])[0].min(ids.len() / CHUNK * CHUNK);
    let from = context / 4 * 3;
    let precision = Precision::Fp16;
    let exact = program(checkpoint, Attention::Tiled(Tiles::default()), context, DType::F16, Logits::All);
    let mut session = Session::new(&exact, precision);
    let (mut start, mut expected) = (None, Vec::new());
    for position in (0..context - CHUNK).step_by(CHUNK) {
        if position == from {
            start = session.states.get("kv_cache");
        }
        let logits = session.chunk("prefill", &ids[position..position + CHUNK], position);
        if position >= from {
            expected.push(logits);
        }
    }
    let start = start.unwrap();
    println!(
        "tokens {from} to {} of {context}, chunk {CHUNK}, the first {} layers exact\n",
        context - CHUNK,
        SPARSE.dense_layers
    );
    println!(
        "{:>6} {:<6} {:<7} {:<6} {:>8} {:>10} {:>8} {:>11} {:>11} {:>11}",
        "budget",
        "select",
        "gather",
        "means",
        "density",
        "KL",
        "top-1",
        "perplexity",
        "exact's",
        "same blocks"
    );
    let budgets: Vec<usize> = match std::env::var("BUDGETS") {
        Ok(given) => given.split(',').map(|n| n.parse().unwrap()).collect(),
        Err(_) => vec![8, 12, 16, 24, 32, 48],
    };
    for budget in budgets.into_iter().filter(|b| b * SPARSE.block <= from) {
        let mut first: Option<Vec<Vec<f32>>> = None;
        for (select, gather, correction) in [
            (Select::Layer, Gather::Index, true),
            (Select::Layer, Gather::OneHot, true),
            (Select::Head, Gather::Index, true),
            (Select::Layer, Gather::Index, false),
        ] {
            let form = Sparse { budget, gather, correction, select, ..SPARSE };
            let blocks = program(
                checkpoint,
                Attention::Sparse(form, Tiles::default()),
                context,
                DType::F16,
                Logits::All,
            );
            let mut ours = Session::new(&blocks, precision);
            ours.states.set("kv_cache", start.clone()).unwrap();
            ours.machine.run("repool", &BTreeMap::new(), &mut ours.states, None).unwrap();
            let (mut sums, mut all) = (Sums::default(), Vec::new());
            for (i, position) in (from..context - CHUNK).step_by(CHUNK).enumerate() {
                let seen = ours.chunk("prefill_sparse", &ids[position..position + CHUNK], position);
                sums.add(&seen, &expected[i], &ids[position + 1..=position + CHUNK]);
                let new = CHUNK * (CHUNK + 1) / 2;
                sums.visible += (position * CHUNK + new) as f64;
                sums.kept += (budget * form.block * CHUNK + new) as f64;
                all.push(seen);
            }
            // Logits are equal to the last bit only where the same blocks were chosen.
            let equal = match (&first, gather) {
                (None, _) => {
                    first = Some(all);
                    ""
                }
                (Some(first), Gather::OneHot) if *first == all => "yes",
                (Some(_), Gather::OneHot) => "no",
                _ => "",
            };
            let n = sums.tokens.max(1) as f64;
            println!(
                "{budget:>6} {:<6} {:<7} {:<6} {:>7.1}% {:>10.2e} {:>7.2}% {:>11.4} {:>11.4} {equal:>11}",
                format!("{select:?}").to_lowercase(),
                format!("{gather:?}").to_lowercase(),
                if correction { "yes" } else { "no" },
                100.0 * sums.kept / sums.visible,
                sums.kl / n,
                100.0 * sums.top as f64 / n,
                (sums.ours / n).exp(),
                (sums.theirs / n).exp(),
            );
            std::io::stdout().flush().unwrap();
        }
    }
}

#[derive(Default)]
struct Sums {
    tokens: usize,
    kl: f64,
    top: usize,
    ours: f64,
    theirs: f64,
    visible: f64,
    kept: f64,
}

impl Sums {
    fn add(&mut self, seen: &[f32], expected: &[f32], next: &[i64]) {
        let width = seen.len() / next.len();
        for ((a, b), next) in seen.chunks(width).zip(expected.chunks(width)).zip(next) {
            let (p, q) = (log_softmax(b), log_softmax(a));
            self.kl += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            self.top += usize::from(best(a) == best(b));
            let next = usize::try_from(*next).unwrap();
            self.ours -= q[next];
            self.theirs -= p[next];
            self.tokens += 1;
        }
    }
}

fn log_softmax(x: &[f32]) -> Vec<f64> {
    let top = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = x.iter().map(|v| f64::from(v - top).exp()).sum();
    x.iter().map(|v| f64::from(v - top) - sum.ln()).collect()
}

fn best(x: &[f32]) -> usize {
    (0..x.len()).fold(0, |best, i| if x[i] > x[best] { i } else { best })
}
