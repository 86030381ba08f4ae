//! What quantization costs a language model: perplexity, divergence and true bits a weight, scheme by scheme.
//!
//! ```text
//! cargo bench --profile dev --bench perplexity -- CHECKPOINT [TOKENS TO CALIBRATE ON [TOKENS TO FORESEE [ROWS]]] [--rotate]
//! ```
//!
//! Calibrated on the first two chapters of a novel, schemes chosen on the 1,024 tokens after those, measured on
//! the chapters from the third on. Every weight that is multiplied, and the table of words, goes through `quant`
//! as a weight of a program; what is read back is run by the reference, a row of 512 tokens at a time. Divergence
//! is that of predictions from the unquantized model's, in nats a token; what is measured before, on the
//! tokens that schemes are chosen on, stands beside it. ROWS is a part of the names of rows that are wanted.
//! With `--rotate` the model is rotated first.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a bench reports, and fails by panicking")]
#![expect(clippy::cast_precision_loss, reason = "there are some thousand tokens")]

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap},
    io::Write,
    sync::Arc,
    time::Instant,
};

use half::f16;
use silane::{
    checkpoint::Checkpoint,
    graph::{Builder, In},
    mil::{DType, Program, Type, Weight, constant::encode_floats},
    models,
    ops::Opset,
    quant::{
        self, Allocation, Budget, Calibration, Choices, Inputs, Method, Options, Policy, Report, Scheme,
        candidates,
    },
    reference::{Decoder, Divisors, Predictions, Wanted, observe},
};

const ROW: usize = 512;
/// Tokens by which schemes are chosen, and of them those on which each weight is tried.
const HELD: usize = 1024;
const MEASURED: usize = 256;
/// Of so many predictions one is compared there.
const EVERY: usize = 2;
const OPTIONS: Options =
    Options { target: quant::Target::Ane, allow_slow: true, recompress: false, trusted: true };

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let Some(folder) = args.first() else {
        println!("perplexity: give a checkpoint's folder; nothing was measured");
        return;
    };
    let number = |at: usize, or: usize| args.get(at).map_or(or, |n| n.parse().unwrap());
    let mut checkpoint = Checkpoint::open(folder).unwrap();
    if std::env::args().any(|a| a == "--rotate") {
        let rotated = models::rotated(&checkpoint, checkpoint.config.model_type().unwrap()).unwrap();
        checkpoint = rotated.checkpoint;
    }
    let text = include_str!("text/moby-dick.txt");
    let (before, after) = text.split_once("CHAPTER 3.").unwrap();
    let tokenizer = checkpoint.tokenizer().unwrap();
    let rows = |text: &str| -> Vec<Vec<u32>> {
        tokenizer.encode_rows(text, ROW).unwrap().into_iter().map(|e| e.ids).collect()
    };
    let (mut taught, mut asked) = (rows(before), rows(after));
    let mut held = taught.split_off((number(1, 4096) / ROW).min(taught.len() - HELD / ROW));
    held.truncate(HELD / ROW);
    asked.truncate(number(2, 3072) / ROW);
    let bench = Bench::new(&checkpoint, &held, &asked);
    let count = |rows: &[Vec<u32>]| rows.iter().map(Vec::len).sum::<usize>();
    println!("{folder}: calibrated on {} tokens, measured on {}", count(&taught), count(&asked));
    println!(
        "{:<28} {:>7} {:>10} {:>10} {:>8} {:>7}",
        "weights", "bits", "perplexity", "divergence", "before", "seconds"
    );
    show("fp32", 32.0, bench.measure(&bench.original), None, 0.0);

    let start = Instant::now();
    let gptq = Arc::new(bench.learn(&taught, &held[0][..MEASURED]));
    println!("(what is learnt: {:.0} s)", start.elapsed().as_secs_f64());
    let importance = Arc::new(Calibration { method: Method::Importance, ..(*gptq).clone() });
    let start = Instant::now();
    let schemes = candidates(Opset::Ios18).unwrap();
    let choices =
        Choices::measure(&[&bench.program], &schemes, quant::SMALLEST, OPTIONS, Some(&gptq)).unwrap();
    println!("(choices: {:.0} s)", start.elapsed().as_secs_f64());

    let wanted = |name: &str| args.get(3).is_none_or(|part| name.contains(part.as_str()));
    let row = |name: &str, policy: &Policy, how: Option<&Arc<Calibration>>, before: Option<f64>| {
        let start = Instant::now();
        let (decoder, bits) = bench.quantize(policy, how);
        show(name, bits, bench.measure(&decoder), before, start.elapsed().as_secs_f64());
    };
    let uniform = |text: &str, how: &str| {
        let (name, policy) = (format!("{text} {how}"), Policy::uniform(text.parse().unwrap()));
        let by = [("importance", &importance), ("gptq", &gptq)].into_iter().find(|h| h.0 == how);
        if wanted(&name) {
            row(name.trim(), &policy, by.map(|b| b.1), None);
        }
    };
    let chosen = |name: &str, budget: Budget| {
        if wanted(name) {
            let chosen = choices.nearest(budget, |tried| bench.cost(&gptq, tried)).unwrap();
            row(name, &chosen.policy, Some(&gptq), chosen.measured);
        }
    };
    uniform("fp16", "");
    for scheme in ["int8", "lut8", "lut6:g16", "lut4:g16", "int4"] {
        for how in ["", "importance", "gptq"] {
            uniform(scheme, how);
        }
        let parsed = scheme.parse::<Scheme>().unwrap();
        if schemes.contains(&parsed) {
            let (bytes, _) = choices.uniform(&parsed);
            chosen(&format!("no larger than {scheme} gptq"), Budget::Bytes(bytes));
        }
    }
    for bits in [4.0, 4.5, 5.0, 5.5, 6.0] {
        chosen(&format!("budget {bits} gptq"), Budget::BitsPerWeight(bits));
    }
}

fn show(name: &str, bits: f64, (perplexity, divergence): (f64, f64), before: Option<f64>, seconds: f64) {
    let before = before.map_or("-".into(), |f| format!("{f:.5}"));
    println!("{name:<28} {bits:>7.3} {perplexity:>10.4} {divergence:>10.5} {before:>8} {seconds:>7.0}");
    std::io::stdout().flush().unwrap();
}

/// A model, a program that holds its weights, and what it predicts.
struct Bench<'a> {
    checkpoint: &'a Checkpoint,
    original: Decoder,
    program: Program,
    held: Vec<(Vec<u32>, Predictions)>,
    asked: Vec<(Vec<u32>, Predictions)>,
    /// Weights that were compressed, by name, scheme and method.
    known: RefCell<HashMap<String, Arc<Vec<f16>>>>,
}

impl<'a> Bench<'a> {
    fn new(checkpoint: &'a Checkpoint, held: &[Vec<u32>], asked: &[Vec<u32>]) -> Bench<'a> {
        let mut original = Decoder::open(checkpoint).unwrap();
        let predicted = |rows: &[Vec<u32>], every: usize| -> Vec<(Vec<u32>, Predictions)> {
            rows.iter().map(|row| (row.clone(), original.predictions(row, every).unwrap())).collect()
        };
        let (held, asked) = (predicted(held, EVERY), predicted(asked, 1));
        Bench {
            checkpoint,
            program: program(&mut original),
            original,
            held,
            asked,
            known: RefCell::default(),
        }
    }

    fn learn(&self, taught: &[Vec<u32>], row: &[u32]) -> Calibration {
        let mut decoder = self.original.clone();
        let given = observe(self.checkpoint, taught, Wanted::Hessians, &Divisors::new()).unwrap().given;
        let inputs = given.iter().map(|(name, given)| {
            let (moments, magnitudes) = (given.moments.clone(), given.magnitudes.clone());
            (name.clone(), Arc::new(Inputs::new(moments, given.hessian.clone(), magnitudes).unwrap()))
        });
        let (method, inputs) = (Method::Feedback, inputs.collect());
        let mut calibration = Calibration { method, inputs, costs: BTreeMap::new() };
        let probes = quant::probes(Opset::Ios18).unwrap();
        calibration.learn_costs(&probes, |tried| decoder.costs(row, EVERY, tried)).unwrap();
        calibration
    }

    /// Puts what would be read back into the model; gives the bits of a weight.
    fn quantize(&self, policy: &Policy, how: Option<&Arc<Calibration>>) -> (Decoder, f64) {
        let mut program = self.program.clone();
        let report: Report = quant::apply_calibrated(&mut program, policy, OPTIONS, how).unwrap();
        let mut decoder = self.original.clone();
        for (name, _) in decoder.weights() {
            let place = name.replace('.', "_");
            let entry = report.tensors.iter().find(|e| {
                e.name.strip_prefix(&place).is_some_and(|rest| ["_x", "_conv_weight"].contains(&rest))
            });
            let new = match entry {
                Some(entry) => {
                    let method = how.map_or("plain", |how| how.method.name());
                    self.known(&name, &entry.scheme, method, || entry.values().unwrap().0)
                }
                None => decoder.weight(&name).unwrap().iter().map(|v| f16::from_f32(*v).to_f32()).collect(),
            };
            decoder.replace(&name, new).unwrap();
        }
        (decoder, report.bits_per_weight().1)
    }

    fn known(&self, name: &str, scheme: &Scheme, method: &str, make: impl FnOnce() -> Vec<f32>) -> Vec<f32> {
        let key = format!("{name} {scheme} {method}");
        let known = self.known.borrow().get(&key).cloned();
        let known = known.unwrap_or_else(|| {
            let made: Arc<Vec<f16>> = Arc::new(make().into_iter().map(f16::from_f32).collect());
            self.known.borrow_mut().insert(key, Arc::clone(&made));
            made
        });
        known.iter().map(|v| v.to_f32()).collect()
    }

    /// Perplexity, and divergence from the original.
    fn measure(&self, decoder: &Decoder) -> (f64, f64) {
        let (mut surprise, mut tokens, mut off, mut places) = (0.0, 0, 0.0, 0);
        for (row, before) in &self.asked {
            let after = decoder.predictions(row, 1).unwrap();
            let (sum, n) = after.surprise(row).unwrap();
            (surprise, tokens) = (surprise + sum, tokens + n);
            (off, places) = (off + before.divergence(&after) * row.len() as f64, places + row.len());
        }
        ((surprise / tokens as f64).exp(), off / places as f64)
    }

    /// The divergence of a choice, on the tokens that are held back for it.
    fn cost(&self, how: &Calibration, tried: &Allocation) -> silane::error::Result<f64> {
        let mut decoder = self.original.clone();
        for (name, shape) in decoder.weights() {
            let Some(scheme) = tried.scheme(&name) else { continue };
            let (values, looked_up) = (self.original.clone().weight(&name)?, decoder.looks_up(&name));
            let make = || how.compressed(&name, &values, shape, looked_up, scheme).unwrap();
            let new = self.known(&name, scheme, how.method.name(), make);
            decoder.replace(&name, new)?;
        }
        let (mut off, mut places) = (0.0, 0);
        for (row, before) in &self.held {
            let after = decoder.predictions(row, EVERY)?;
            (off, places) = (off + before.divergence(&after) * row.len() as f64, places + row.len());
        }
        Ok(off / places as f64)
    }
}

fn program(decoder: &mut Decoder) -> Program {
    let mut b = Builder::new(Opset::Ios18);
    let ids = b.input("ids", Type::tensor(DType::I32, [1, 4])).unwrap();
    let weights = decoder.weights();
    for (i, (name, [out, width])) in weights.iter().enumerate() {
        let values = Arc::new(decoder.weight(name).unwrap());
        let weight = |shape: Vec<usize>| {
            let values = Arc::clone(&values);
            let bytes = move || Ok(encode_floats(DType::F16, &values)?.into());
            Weight::new(format!("ckpt:{name} | fp16"), DType::F16, shape, bytes)
        };
        // The words come first; a head of its own is told by its name.
        let tied = i == 0 && !weights.iter().any(|(n, _)| n.contains("head") || n.contains("embed_out"));
        if i == 0 {
            let params =
                [("x", weight(vec![*out, *width]).into()), ("indices", ids.into()), ("axis", 0.into())];
            b.op("gather", name, params).unwrap();
        }
        if i > 0 || tied {
            let x = b.input(&format!("x{i}"), Type::tensor(DType::F16, [1, *width, 1, 1])).unwrap();
            let params: [(&str, In); 7] = [
                ("x", x.into()),
                ("weight", weight(vec![*out, *width, 1, 1]).into()),
                ("strides", [1, 1].into()),
                ("pad_type", "valid".into()),
                ("pad", [0, 0, 0, 0].into()),
                ("dilations", [1, 1].into()),
                ("groups", 1.into()),
            ];
            b.op("conv", &format!("{name}.conv"), params).unwrap();
        }
    }
    Program { functions: [("main".to_string(), b.finish(vec![]))].into(), ..Program::default() }
}
