//! The interpreter against candle's plain forward pass of the same language model, in one run:
//!
//! ```text
//! cargo bench --bench decoders -- CHECKPOINT
//! ```
//!
//! Decode is one token at position 0, prefill a chunk of 64; both sides compute in 32-bit floats from the
//! same weights, and the interpreter rounds every result to fp16 on top. A ratio above 1 means that the
//! interpreter is faster.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a bench reports, and fails by panicking")]

use std::{collections::BTreeMap, time::Instant};

use silane::{
    checkpoint::Checkpoint,
    interp::{Machine, Precision},
    models::{self, Chunks, Plan},
    ops::Val,
    passes,
    reference::Decoder,
};

const CHUNK: usize = 64;
const ROUNDS: usize = 5;

fn main() {
    let Some(folder) = std::env::args().skip(1).find(|a| !a.starts_with("--")) else {
        println!("decoders: give a checkpoint's folder; nothing was measured");
        return;
    };
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let chunks = Chunks { contexts: vec![512], chunk: Some(CHUNK), ..Chunks::default() };
    let plan = Plan::language(chunks);
    let mut program =
        models::build(&checkpoint, &plan, checkpoint.config.model_type().unwrap()).unwrap().remove(0).program;
    passes::tidy(&mut program).unwrap();
    let mut machine = Machine::new(&program, Precision::Fp16);
    let reference = Decoder::open(&checkpoint).unwrap();
    for (function, tokens) in [("decode", 1), ("prefill", CHUNK)] {
        let ids = || (0..tokens).map(|i| i64::try_from(i).unwrap());
        let inputs = BTreeMap::from([
            ("input_ids".to_string(), Val::ints(ids().map(|i| i + 5).collect(), &[1, tokens]).unwrap()),
            ("position_ids".to_string(), Val::ints(ids().collect(), &[1, tokens]).unwrap()),
        ]);
        let mut states = machine.states(function).unwrap();
        let ours = best(|| drop(machine.run(function, &inputs, &mut states, None).unwrap()));
        let row: Vec<u32> = (0..tokens).map(|i| u32::try_from(i).unwrap() + 5).collect();
        let candle = best(|| drop(reference.forward(std::slice::from_ref(&row), None).unwrap()));
        println!(
            "{function:<8} {tokens:>3} tokens: interpreter {:.1} ms, candle {:.1} ms, ratio {:.2}",
            ours * 1e3,
            candle * 1e3,
            candle / ours
        );
    }
}

/// The least seconds of some rounds, after one that is not counted.
fn best(mut f: impl FnMut()) -> f64 {
    f();
    (0..ROUNDS).fold(f64::INFINITY, |least, _| {
        let start = Instant::now();
        f();
        least.min(start.elapsed().as_secs_f64())
    })
}
