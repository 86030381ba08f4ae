//! What quantization costs a language model: perplexity and true bits a weight, scheme by scheme.
//!
//! ```text
//! cargo bench --profile dev --bench perplexity -- CHECKPOINT [TOKENS TO CALIBRATE ON [TOKENS TO FORESEE [ROWS]]]
//! ```
//!
//! Calibrated on the first two chapters of a novel, measured on those from the third on. Every weight that
//! is multiplied, and the table of words, goes through `quant` as a weight of a program; what is read back is
//! run by the reference, a row of 512 tokens at a time. ROWS is a part of the names of rows that are wanted.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a bench reports, and fails by panicking")]

use std::{collections::BTreeMap, io::Write, sync::Arc, time::Instant};

use silane::{
    checkpoint::Checkpoint,
    graph::{Builder, In},
    mil::{DType, Program, Type, Weight, constant::encode_floats},
    ops::Opset,
    quant::{
        self, Budget, Calibration, Choices, Inputs, Method, Options, Policy, Report, Scheme, candidates,
    },
    reference::{Decoder, Wanted},
};

const ROW: usize = 512;

fn main() {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let Some(folder) = args.first() else {
        println!("perplexity: give a checkpoint's folder; nothing was measured");
        return;
    };
    let number = |at: usize, or: usize| args.get(at).map_or(or, |n| n.parse().unwrap());
    let checkpoint = Checkpoint::open(folder).unwrap();
    let text = include_str!("text/moby-dick.txt");
    let (before, after) = text.split_once("CHAPTER 3.").unwrap();
    let tokenizer = checkpoint.tokenizer().unwrap();
    let rows = |text: &str, most: usize| -> Vec<Vec<u32>> {
        let ids = tokenizer.encode(text).unwrap().ids;
        ids[..ids.len().min(most)].chunks(ROW).filter(|r| r.len() > 1).map(<[u32]>::to_vec).collect()
    };
    let (taught, asked) = (rows(before, number(1, 4096)), rows(after, number(2, 3072)));
    let mut decoder = Decoder::open(&checkpoint).unwrap();
    let mut bench = Bench::new(&mut decoder);
    let count = |rows: &[Vec<u32>]| rows.iter().map(Vec::len).sum::<usize>();
    println!("{folder}: calibrated on {} tokens, measured on {}", count(&taught), count(&asked));
    println!("{:<26} {:>8} {:>10} {:>9} {:>9}", "weights", "bits", "perplexity", "foreseen", "seconds");
    let plain = bench.perplexity(&decoder, &asked);
    show("fp32", 32.0, plain, None, 0.0);

    let start = Instant::now();
    let given = decoder.observe(&taught, Wanted::Hessians).unwrap().given;
    let inputs = given.iter().map(|(name, given)| {
        let inputs = Inputs {
            moments: given.moments.clone(),
            hessian: given.hessian.clone(),
            magnitudes: given.magnitudes.clone(),
        };
        (name.clone(), Arc::new(inputs))
    });
    let mut gptq = Calibration { method: Method::Feedback, inputs: inputs.collect(), costs: BTreeMap::new() };
    println!("(calibration: {:.0} s)", start.elapsed().as_secs_f64());
    let start = Instant::now();
    let short = &taught[0][..taught[0].len().min(256)];
    gptq.learn_costs(&"lut4:g16".parse().unwrap(), |tried| decoder.costs(short, tried)).unwrap();
    println!("(costs: {:.0} s)", start.elapsed().as_secs_f64());
    let importance = Arc::new(Calibration { method: Method::Importance, ..gptq.clone() });
    let gptq = Arc::new(gptq);

    let options = Options { allow_slow: true, trusted: true, ..Options::default() };
    let schemes = candidates(Opset::Ios18).unwrap();
    let start = Instant::now();
    let choices = Choices::measure(&[&bench.program], &schemes, options, &importance).unwrap();
    println!("(choices: {:.0} s)", start.elapsed().as_secs_f64());
    let mut one = |name: &str, policy: &Policy, how: Option<&Arc<Calibration>>, foreseen: Option<f64>| {
        if args.get(3).is_some_and(|part| !name.contains(part.as_str())) {
            return;
        }
        let start = Instant::now();
        let bits = bench.quantize(&mut decoder, policy, options, how);
        let perplexity = bench.perplexity(&decoder, &asked);
        show(name, bits, perplexity, foreseen, start.elapsed().as_secs_f64());
    };
    let scheme = |text: &str| text.parse::<Scheme>().unwrap();
    let uniform = |text: &str| Policy::uniform(scheme(text));
    let foreseen = |text: &str| Some(choices.uniform(&scheme(text)).1);
    one("fp16", &uniform("fp16"), None, None);
    one("lut4:g16 plain", &uniform("lut4:g16"), None, None);
    one("lut4:g16 importance", &uniform("lut4:g16"), Some(&importance), None);
    one("int4 plain", &uniform("int4"), None, None);
    one("int4 gptq", &uniform("int4"), Some(&gptq), None);
    for text in ["lut4:g16", "lut6:g16", "int8"] {
        one(&format!("{text} gptq"), &uniform(text), Some(&gptq), foreseen(text));
        let (bytes, _) = choices.uniform(&scheme(text));
        let chosen = choices.within(Budget::Bytes(bytes)).unwrap();
        one(&format!("no larger than {text} gptq"), &chosen.policy, Some(&gptq), Some(chosen.loss));
    }
    for budget in [4.0, 4.5, 5.0, 5.5, 6.0] {
        let chosen = choices.within(Budget::BitsPerWeight(budget)).unwrap();
        one(&format!("budget {budget} gptq"), &chosen.policy, Some(&gptq), Some(chosen.loss));
    }
    one("lut6:g16 plain", &uniform("lut6:g16"), None, None);
    one("int8 plain", &uniform("int8"), None, None);
    one("lut3:g16 gptq", &uniform("lut3:g16"), Some(&gptq), foreseen("lut3:g16"));
}

fn show(name: &str, bits: f64, perplexity: f64, foreseen: Option<f64>, seconds: f64) {
    let foreseen = foreseen.map_or("-".into(), |f| format!("{f:.4}"));
    println!("{name:<26} {bits:>8.3} {perplexity:>10.4} {foreseen:>9} {seconds:>9.0}");
    std::io::stdout().flush().unwrap();
}

/// A program that holds the weights of a model, and the model.
struct Bench {
    program: Program,
    originals: BTreeMap<String, Arc<Vec<f32>>>,
}

impl Bench {
    fn new(decoder: &mut Decoder) -> Bench {
        let mut b = Builder::new(Opset::Ios18);
        let mut originals = BTreeMap::new();
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
            originals.insert(name.clone(), values);
        }
        let program =
            Program { functions: [("main".to_string(), b.finish(vec![]))].into(), ..Program::default() };
        Bench { program, originals }
    }

    /// Puts what would be read back into the model; gives the bits of a weight.
    fn quantize(
        &self,
        decoder: &mut Decoder,
        policy: &Policy,
        options: Options,
        how: Option<&Arc<Calibration>>,
    ) -> f64 {
        let mut program = self.program.clone();
        let report: Report = quant::apply_calibrated(&mut program, policy, options, how).unwrap();
        for (name, values) in &self.originals {
            let place = name.replace('.', "_");
            let entry = report.tensors.iter().find(|e| {
                e.name.strip_prefix(&place).is_some_and(|rest| ["_x", "_conv_weight"].contains(&rest))
            });
            let new = match entry {
                Some(entry) => entry.values().unwrap().0,
                None => values.iter().map(|v| half::f16::from_f32(*v).to_f32()).collect(),
            };
            decoder.replace(name, new).unwrap();
        }
        report.bits_per_weight().1
    }

    fn perplexity(&mut self, decoder: &Decoder, rows: &[Vec<u32>]) -> f64 {
        let sums = rows.iter().map(|row| decoder.surprise(row).unwrap());
        let (sum, n) = sums.fold((0.0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        #[expect(clippy::cast_precision_loss, reason = "there are some thousand tokens")]
        let mean = sum / n as f64;
        mean.exp()
    }
}
