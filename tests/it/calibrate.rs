//! Quantization by what a text taught: nearer outputs, sizes that are kept, the same bytes each time.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use silane::{
    checkpoint::Checkpoint,
    mil::Program,
    models::{self, Chunks, Plan},
    ops::Opset,
    passes,
    quant::{
        self, Budget, Calibration, Choices, Curve, Entry, Inputs, Method, Options, Policy, Report, SMALLEST,
        Scheme, apply_calibrated, candidates,
    },
    reference::{Decoder, Divisors, Observed, Wanted, observe},
};

const OPTIONS: Options =
    Options { target: quant::Target::Ane, allow_slow: true, recompress: false, trusted: true };

struct Model {
    program: Program,
    decoder: Decoder,
    rows: Vec<Vec<u32>>,
    observed: Observed,
    costs: BTreeMap<String, Curve>,
}

impl Model {
    fn new(name: &str) -> Model {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny").join(name);
        let checkpoint = Checkpoint::open_dir(&dir).unwrap();
        let chunks = Chunks { contexts: vec![64], chunk: Some(16), ..Chunks::default() };
        let plan = Plan::language(chunks);
        let kind = checkpoint.config.model_type().unwrap();
        let mut program = models::build(&checkpoint, &plan, kind).unwrap().remove(0).program;
        passes::tidy(&mut program).unwrap();
        let decoder = Decoder::open(&checkpoint).unwrap();
        let rows: Vec<Vec<u32>> =
            (0..8u32).map(|r| (0..48).map(|i| (r * 37 + i * i * 11 + i * 5) % 250 + 5).collect()).collect();
        let observed = observe(&checkpoint, &rows, Wanted::Hessians, &Divisors::new()).unwrap();
        let mut model = Model { program, decoder, rows, observed, costs: BTreeMap::new() };
        let mut calibration = Calibration::clone(&model.calibration(Method::Feedback));
        let schemes = quant::probes(Opset::Ios18).unwrap();
        let Model { decoder, rows, .. } = &mut model;
        calibration.learn_costs(&schemes, |tried| decoder.costs(&rows[0], 1, tried)).unwrap();
        model.costs = calibration.costs;
        model
    }

    fn calibration(&self, method: Method) -> Arc<Calibration> {
        let inputs = self.observed.given.iter().map(|(name, given)| {
            let (moments, magnitudes) = (given.moments.clone(), given.magnitudes.clone());
            (name.clone(), Arc::new(Inputs::new(moments, given.hessian.clone(), magnitudes).unwrap()))
        });
        Arc::new(Calibration { method, inputs: inputs.collect(), costs: self.costs.clone() })
    }

    fn quantize(&self, policy: &Policy, how: Option<&Arc<Calibration>>) -> Report {
        apply_calibrated(&mut self.program.clone(), policy, OPTIONS, how).unwrap()
    }

    /// The squared error of what a weight makes of the text, over what it makes.
    fn loss(&self, entry: &Entry, tensor: &str) -> f64 {
        let given = &self.observed.given[tensor];
        let (hessian, tight) = (given.hessian.as_ref().unwrap(), given.moments.len());
        let (decoded, values) = entry.values().unwrap();
        let width = entry.ty.shape().unwrap()[1];
        // Heads of 20 channels are padded to 32.
        let from = |c: usize| match width {
            _ if width == tight => Some(c),
            _ => (c % 32 < 20).then_some(c / 32 * 20 + c % 32),
        };
        let quadratic = |row: &[f32]| {
            let real: Vec<(usize, f64)> =
                (0..width).filter_map(|c| Some((from(c)?, f64::from(row[c])))).collect();
            let one = |(i, a): &(usize, f64)| {
                real.iter().map(|(j, b)| a * b * f64::from(hessian[i * tight + j])).sum::<f64>()
            };
            real.iter().map(one).sum::<f64>()
        };
        let off: Vec<f32> = decoded.iter().zip(&values).map(|(a, b)| a - b).collect();
        let sum = |rows: &[f32]| rows.chunks(width).map(quadratic).sum::<f64>();
        sum(&off) / sum(&values)
    }
}

fn uniform(scheme: &str) -> Policy {
    Policy::uniform(scheme.parse().unwrap())
}

/// Weights of one layer, by their names in the program and in the checkpoint.
const SOME: [(&str, &str); 4] = [
    ("model_layers_1_self_attn_o_proj_weight", "model.layers.1.self_attn.o_proj.weight"),
    ("model_layers_1_mlp_gate_proj_up_weight", "model.layers.1.mlp.gate_proj.weight"),
    ("model_layers_1_mlp_down_proj_weight", "model.layers.1.mlp.down_proj.weight"),
    ("lm_head_weight", "lm_head.weight"),
];

#[test]
fn what_a_text_taught_makes_outputs_nearer() {
    let model = Model::new("llama");
    let (importance, gptq) = (model.calibration(Method::Importance), model.calibration(Method::Feedback));
    for scheme in ["int4", "uint4", "int4:b16", "lut4", "lut4:g16", "lut3:g8", "lut4:i8", "int8"] {
        let policy = uniform(scheme);
        let reports = [None, Some(&importance), Some(&gptq)].map(|how| model.quantize(&policy, how));
        let mut sums = [0.0; 3];
        for (name, tensor) in SOME {
            for (report, sum) in reports.iter().zip(&mut sums) {
                let names: Vec<&str> = report.tensors.iter().map(|e| e.name.as_str()).collect();
                let entry = report.tensors.iter().find(|e| e.name == name);
                *sum += model.loss(entry.unwrap_or_else(|| panic!("{name} is not in {names:?}")), tensor);
            }
        }
        let [plain, weighted, fed] = sums;
        println!("{scheme}: {plain:.3e} {weighted:.3e} {fed:.3e}");
        assert!(weighted < 1.02 * plain, "{scheme}: importance {weighted:e}, plain {plain:e}");
        assert!(fed < 0.9 * plain && fed < weighted, "{scheme}: {fed:e}, {weighted:e}, plain {plain:e}");
    }
}

#[test]
fn reports_say_what_was_done_to_each_weight() {
    let model = Model::new("llama");
    let gptq = model.calibration(Method::Feedback);
    let report = model.quantize(&uniform("lut4:g16"), Some(&gptq));
    let said: BTreeMap<&str, _> =
        report.tensors.iter().map(|e| (e.name.as_str(), e.calibrated().unwrap())).collect();
    for (name, _) in SOME {
        assert_eq!(said[name], Ok(Method::Feedback), "{name}");
    }
    let words = "the text taught nothing about the inputs of `model.embed_tokens.weight`";
    assert_eq!(said["model_embed_tokens_x"], Err(words));
    // Vectors have one code for several outputs, and zeros stay zeros: these are weighed only.
    for scheme in ["lut4:v2", "sparse50+int8"] {
        let report = model.quantize(&uniform(scheme), Some(&gptq));
        let head = report.tensors.iter().find(|e| e.name == "lm_head_weight").unwrap();
        let expected = if head.scheme.to_string() == scheme { Method::Importance } else { Method::Feedback };
        assert_eq!(head.calibrated(), Some(Ok(expected)), "{scheme}");
        head.values().unwrap();
    }
    assert!(model.quantize(&uniform("lut4"), None).tensors.iter().all(|e| e.calibrated().is_none()));
}

#[test]
fn the_same_bytes_on_any_number_of_threads() {
    let model = Model::new("gemma3_text");
    let gptq = model.calibration(Method::Feedback);
    let run = |threads: usize| -> (Vec<Vec<f32>>, String) {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let report = model.quantize(&uniform("lut4:g16"), Some(&gptq));
            let schemes = candidates(Opset::Ios18).unwrap();
            let choices =
                Choices::measure(&[&model.program], &schemes, SMALLEST, OPTIONS, Some(&gptq)).unwrap();
            let recipe = choices.within(Budget::BitsPerWeight(6.0)).unwrap().policy.text().unwrap();
            (report.tensors.iter().map(|e| e.values().unwrap().0).collect(), recipe)
        })
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn budgets_are_kept_and_beat_one_scheme_for_all() {
    for name in ["llama", "gemma3_text"] {
        let model = Model::new(name);
        let how = model.calibration(Method::Importance);
        let schemes = candidates(Opset::Ios18).unwrap();
        let choices = Choices::measure(&[&model.program], &schemes, SMALLEST, OPTIONS, Some(&how)).unwrap();
        for scheme in schemes.iter().filter(|s| **s != Scheme::Dense) {
            let (bytes, loss) = choices.uniform(scheme);
            let report = model.quantize(&Policy::uniform(*scheme), Some(&how));
            assert_eq!(report.after, bytes, "{name} {scheme}");
            let chosen = choices.within(Budget::Bytes(bytes)).unwrap();
            assert!(chosen.bytes <= bytes, "{name} {scheme}: {} of {bytes}", chosen.bytes);
            assert!(chosen.loss <= loss, "{name} {scheme}: {:e} for {loss:e}", chosen.loss);
        }
        let mut last = f64::INFINITY;
        for bits in [6.0, 7.0, 8.5, 10.0, 16.0] {
            let chosen = choices.within(Budget::BitsPerWeight(bits)).unwrap();
            assert!(chosen.loss <= last, "{name} {bits}");
            last = chosen.loss;
            // What is written is what was foreseen, and the recipe says the same once it was written down.
            let recipe = Policy::parse(&chosen.policy.text().unwrap()).unwrap();
            for policy in [&chosen.policy, &recipe] {
                let report = model.quantize(policy, Some(&how));
                assert_eq!(report.after, chosen.bytes, "{name} {bits}");
                assert!(report.bits_per_weight().1 <= bits, "{name} {bits}: {}", report.bits_per_weight().1);
                policy.refuse_unused([report.used.as_slice()]).unwrap();
            }
        }
        let least = choices.within(Budget::Bytes(10)).unwrap_err();
        assert!(least.message().contains("bytes at least") && least.way_out().is_some(), "{least}");
    }
}

/// What is chosen by trying it is never behind a scheme for all, and what is tried is what is written.
#[test]
fn what_is_nearest_is_measured() {
    let model = Model::new("llama");
    let how = model.calibration(Method::Feedback);
    let schemes = candidates(Opset::Ios18).unwrap();
    let choices = Choices::measure(&[&model.program], &schemes, SMALLEST, OPTIONS, Some(&how)).unwrap();
    let cost = |scheme: &dyn Fn(&str) -> Option<Scheme>| {
        let (mut decoder, mut changed) = (model.decoder.clone(), model.decoder.clone());
        for (name, shape) in decoder.weights() {
            let (values, looked_up) = (decoder.weight(&name)?, decoder.looks_up(&name));
            if let Some(scheme) = scheme(&name) {
                changed.replace(&name, how.compressed(&name, &values, shape, looked_up, &scheme)?)?;
            }
        }
        decoder.divergence(&changed, &model.rows[..2], 1)
    };
    for text in ["lut4:g16", "lut6:g16", "int8"] {
        let scheme: Scheme = text.parse().unwrap();
        let budget = Budget::Bytes(choices.uniform(&scheme).0);
        let mut tried = 0;
        let chosen = choices.nearest(budget, |one| {
            tried += 1;
            cost(&|name| one.scheme(name).copied())
        });
        let chosen = chosen.unwrap();
        let foreseen = choices.within(budget).unwrap();
        let alone = cost(&|name| foreseen.scheme(name).map(|_| scheme)).unwrap();
        let measured = chosen.measured.unwrap();
        assert!(
            measured <= alone && chosen.bytes <= choices.uniform(&scheme).0,
            "{text}: {measured} {alone}"
        );
        assert!(measured <= cost(&|name| foreseen.scheme(name).copied()).unwrap(), "{text}");
        assert!((1..=4 + schemes.len()).contains(&tried), "{text}: {tried}");
        let report = model.quantize(&chosen.policy, Some(&how));
        for (name, tensor) in SOME {
            let entry = report.tensors.iter().find(|e| e.name == name).unwrap();
            let shape = entry.ty.shape().unwrap();
            let (values, mut decoder) = (entry.values().unwrap(), model.decoder.clone());
            if values.1 == decoder.weight(tensor).unwrap() {
                let scheme = chosen.scheme(tensor).unwrap();
                let tried = how.compressed(tensor, &values.1, [shape[0], shape[1]], false, scheme).unwrap();
                assert_eq!(tried, values.0, "{text} {name}");
            }
        }
    }
}

#[test]
fn products_that_are_none_are_refused() {
    let model = Model::new("llama");
    let broken = |change: &dyn Fn(&mut Inputs)| -> Result<(), String> {
        let mut how = (*model.calibration(Method::Feedback)).clone();
        for inputs in how.inputs.values_mut() {
            change(Arc::make_mut(inputs));
        }
        let mut program = model.program.clone();
        let report = apply_calibrated(&mut program, &uniform("lut4"), OPTIONS, Some(&Arc::new(how)))
            .map_err(|e| e.message().to_string())?;
        report.tensors.iter().try_for_each(|e| e.values().map(|_| ())).map_err(|e| e.message().to_string())
    };
    let short = Inputs::new(vec![1.0; 3], Some(vec![1.0; 7]), Vec::new()).unwrap_err();
    assert!(short.to_string().contains("7 products of inputs, there are 3 inputs"), "{short}");
    let filled = |inputs: &mut Inputs, with: f32| {
        let (n, magnitudes) = (inputs.moments.len(), inputs.magnitudes.clone());
        *inputs = Inputs::new(inputs.moments.clone(), Some(vec![with; n * n]), magnitudes).unwrap();
    };
    let wide = broken(&|i| i.moments.push(1.0)).unwrap_err();
    assert!(wide.contains("products of inputs, there are"), "{wide}");
    let nan = broken(&|i| filled(i, f32::NAN)).unwrap_err();
    assert!(nan.contains("a product of inputs is NaN"), "{nan}");
    let below = broken(&|i| i.moments[3] = -1.0).unwrap_err();
    assert!(below.contains("a mean square of inputs is -1"), "{below}");
    // Inputs that are always zero say nothing, and harm nothing.
    broken(&|i| {
        i.moments.fill(0.0);
        filled(i, 0.0);
    })
    .unwrap();
}
