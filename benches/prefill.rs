//! Prefill of a language model in its three forms, in one run:
//!
//! ```text
//! cargo bench --bench prefill -- CHECKPOINT exact    tiles against dense attention and the reference
//! cargo bench --bench prefill -- CHECKPOINT speed    seconds, operations and memory by context
//! cargo bench --bench prefill -- CHECKPOINT sparse   block-sparse attention by budget
//! ```
//!
//! The text is `benches/text/moby-dick.txt`. `CONTEXTS=2048,4096` limits the contexts.
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
    mil::{DType, Op, Program},
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

fn program(checkpoint: &Checkpoint, attention: Attention, context: usize, float: DType) -> Program {
    let chunks = Chunks {
        contexts: vec![context],
        chunk: Some(CHUNK),
        logits: Logits::All,
        attention,
        ..Chunks::default()
    };
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

    /// The same by block-sparse attention, and which blocks each layer chose.
    fn blocks(&mut self, ids: &[i64], position: usize, chosen: &mut Vec<Vec<f32>>) -> Vec<f32> {
        let mut tap = |_: &Op, name: &str, value: &Val| {
            if name.ends_with("_attn_chosen") {
                chosen.push(value.to_floats().unwrap());
            }
        };
        let inputs = inputs(ids, position);
        let outputs = self.machine.run("prefill_sparse", &inputs, &mut self.states, Some(&mut tap)).unwrap();
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

/// Logits of the last chunk of prompts of several lengths.
fn exact(checkpoint: &Checkpoint, ids: &[i64]) {
    let lengths = contexts(&[256, 512, 1024, 2048, 4096]);
    println!("errors of all logits of the last chunk, as shares of their spread\n");
    println!("{:>6} {:>22} {:>12} {:>12} {:>12}", "tokens", "", "max", "rms", "PSNR");
    let decoder = Decoder::open(checkpoint).unwrap();
    for length in lengths {
        let row: Vec<u32> = ids[..length].iter().map(|i| u32::try_from(*i).unwrap()).collect();
        let logits = decoder.forward(&[row], None).unwrap().logits.squeeze(0).unwrap();
        let reference = logits.narrow(0, length - CHUNK, CHUNK).unwrap().flatten_all().unwrap();
        let reference: Vec<f32> = reference.to_vec1().unwrap();
        drop(logits);
        let run = |attention, float, precision| {
            let program = program(checkpoint, attention, length, float);
            let mut session = Session::new(&program, precision);
            let mut last = Vec::new();
            for position in (0..length).step_by(CHUNK) {
                last = session.chunk("prefill", &ids[position..position + CHUNK], position);
            }
            last
        };
        let tiled = Attention::Tiled(Tiles::default());
        let show = |what: &str, seen: &[f32], expected: &[f32]| {
            let c = compare(seen, expected, 0.0).unwrap();
            let spread = c.max / c.relative().max(f64::MIN_POSITIVE);
            let rms = (seen.iter().zip(expected).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
                / seen.len() as f64)
                .sqrt();
            println!(
                "{length:>6} {what:>22} {:>12.2e} {:>12.2e} {:>9.1} dB",
                c.relative(),
                rms / spread,
                c.psnr
            );
            std::io::stdout().flush().unwrap();
        };
        let dense32 = run(Attention::Dense, DType::F32, Precision::Fp32);
        let tiled32 = run(tiled, DType::F32, Precision::Fp32);
        show("fp32 tiled, dense", &tiled32, &dense32);
        show("fp32 tiled, reference", &tiled32, &reference);
        for precision in [Precision::Fp16, Precision::Fp16Flush] {
            for (name, attention) in [("dense", Attention::Dense), ("tiled", tiled)] {
                let seen = run(attention, DType::F16, precision);
                show(&format!("{precision:?} {name}"), &seen, &reference);
            }
        }
    }
}

fn speed(checkpoint: &Checkpoint, ids: &[i64]) {
    println!(
        "{:>7} {:<26} {:>9} {:>11} {:>13} {:>13} {:>12} {:>7}",
        "context", "form", "prefill s", "last full s", "GFLOP", "attn GFLOP", "peak MiB", "ops"
    );
    let indexed = Sparse { gather: Gather::Index, ..SPARSE };
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
            let program = program(checkpoint, attention, context, DType::F16);
            let mut session = Session::new(&program, Precision::Fp16);
            // Weights are decoded at their first use.
            session.chunk("prefill", &ids[..CHUNK], 0);
            if sparse.is_some() {
                session.chunk("prefill_sparse", &ids[..CHUNK], 0);
            }
            session.states = session.machine.states("decode").unwrap();
            let (mut total, mut last, mut flops, mut attention_flops) = (0.0, 0.0, 0, 0);
            for position in (0..context).step_by(CHUNK) {
                let function = function(sparse, position, context);
                let measure = Measure::of(&program.functions[function]);
                let start = Instant::now();
                session.chunk(function, &ids[position..position + CHUNK], position);
                let took = start.elapsed().as_secs_f64();
                total += took;
                if position + 2 * CHUNK == context {
                    last = took;
                }
                flops += measure.flops;
                attention_flops += measure.attention_flops;
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
    let exact = program(checkpoint, Attention::Tiled(Tiles::default()), context, DType::F16);
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
        "equal sets"
    );
    let budgets: Vec<usize> = match std::env::var("BUDGETS") {
        Ok(given) => given.split(',').map(|n| n.parse().unwrap()).collect(),
        Err(_) => vec![8, 12, 16, 24, 32, 48],
    };
    for budget in budgets.into_iter().filter(|b| b * SPARSE.block <= from) {
        let mut sets: Option<Vec<Vec<f32>>> = None;
        for (select, gather, correction) in [
            (Select::Layer, Gather::Index, true),
            (Select::Layer, Gather::OneHot, true),
            (Select::Head, Gather::Index, true),
            (Select::Layer, Gather::Index, false),
        ] {
            let form = Sparse { budget, gather, correction, select, ..SPARSE };
            let blocks = program(checkpoint, Attention::Sparse(form, Tiles::default()), context, DType::F16);
            let mut ours = Session::new(&blocks, precision);
            ours.states.set("kv_cache", start.clone()).unwrap();
            ours.machine.run("repool", &BTreeMap::new(), &mut ours.states, None).unwrap();
            let (mut sums, mut chosen) = (Sums::default(), Vec::new());
            for (i, position) in (from..context - CHUNK).step_by(CHUNK).enumerate() {
                let seen = ours.blocks(&ids[position..position + CHUNK], position, &mut chosen);
                sums.add(&seen, &expected[i], &ids[position + 1..=position + CHUNK]);
                let new = CHUNK * (CHUNK + 1) / 2;
                sums.visible += (position * CHUNK + new) as f64;
                sums.kept += (budget * form.block * CHUNK + new) as f64;
            }
            let equal = match (&sets, gather) {
                (None, _) => {
                    sets = Some(chosen);
                    ""
                }
                (Some(first), Gather::OneHot) if *first == chosen => "yes",
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
