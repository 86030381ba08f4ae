//! What the reference learns from a text, against the same computed by hand.

use silane::{
    checkpoint::Checkpoint,
    reference::{Decoder, Divisors, Wanted, observe},
};

use super::models;

fn rows(count: u32, length: u32) -> Vec<Vec<u32>> {
    (0..count).map(|r| (0..length).map(|i| (r * 31 + i * i * 7 + i * 13 + 3) % 90 + 5).collect()).collect()
}

fn open(name: &str) -> (Checkpoint, Decoder) {
    let checkpoint = Checkpoint::open_dir(&models().join("tiny").join(name)).unwrap();
    let decoder = Decoder::open(&checkpoint).unwrap();
    (checkpoint, decoder)
}

#[test]
fn inputs_of_linear_layers_are_summed_up() {
    let rows = rows(3, 17);
    let (checkpoint, mut decoder) = open("llama");
    let gain = |name: &str| checkpoint.tensors.floats(name).unwrap();
    // What the first projections are given is the normed words; what the head is given is an output.
    let mut first = Vec::new();
    let mut last = Vec::new();
    for row in &rows {
        let out = decoder.forward(std::slice::from_ref(row), None).unwrap();
        let gain = gain("model.layers.0.input_layernorm.weight");
        for x in out.taps[0].squeeze(0).unwrap().to_vec2::<f32>().unwrap() {
            let mean = x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32;
            first.push(x.iter().zip(&gain).map(|(v, g)| v * g / (mean + 1e-6).sqrt()).collect::<Vec<f32>>());
        }
        last.extend(out.last_hidden_state.squeeze(0).unwrap().to_vec2::<f32>().unwrap());
    }
    let observed = |wanted| observe(&checkpoint, &rows, wanted, &Divisors::new()).unwrap();
    let (observed, again, moments) =
        (observed(Wanted::Hessians), observed(Wanted::Hessians), observed(Wanted::Moments));
    let own = checkpoint.tensors.contains("lm_head.weight");
    let head = if own { "lm_head.weight" } else { "model.embed_tokens.weight" };
    for (name, inputs) in [
        ("model.layers.0.self_attn.q_proj.weight", &first),
        ("model.layers.0.self_attn.v_proj.weight", &first),
        (head, &last),
    ] {
        let seen = &observed.given[name];
        let (n, width) = (inputs.len(), inputs[0].len());
        assert_eq!((seen.tokens, seen.moments.len()), (n as u64, width), "{name}");
        let hessian = seen.hessian.as_ref().unwrap();
        for i in 0..width {
            for j in 0..width {
                let want = inputs.iter().map(|x| f64::from(x[i] * x[j])).sum::<f64>() / n as f64;
                let got = f64::from(hessian[i * width + j]);
                assert!((want - got).abs() < 1e-4 * (1.0 + want.abs()), "{name} {i} {j}: {got} for {want}");
            }
            assert!((seen.moments[i] - hessian[i * width + i]).abs() < 1e-4 * (1.0 + seen.moments[i]));
        }
    }
    // Magnitudes are counted as fp16 has them, each once.
    let seen = &observed.given["model.layers.0.self_attn.q_proj.weight"].magnitudes;
    let count: u64 = seen.iter().map(|(_, n)| n).sum();
    assert_eq!(count as usize, first.iter().map(Vec::len).sum::<usize>());
    assert!(seen.windows(2).all(|w| w[0].0 < w[1].0));
    let largest = first.iter().flatten().fold(0f32, |m, v| m.max(v.abs()));
    assert!((seen.last().unwrap().0 / largest - 1.0).abs() < 1e-3, "{largest}");
    let squares: f64 = seen.iter().map(|(v, n)| f64::from(*v).powi(2) * *n as f64).sum();
    let want: f64 = first.iter().flatten().map(|v| f64::from(*v).powi(2)).sum();
    assert!((squares / want - 1.0).abs() < 1e-3, "{squares} {want}");
    // Every weight that is multiplied is known, and known once more alike.
    for (name, [_, width]) in decoder.weights().into_iter().filter(|(n, _)| n != "model.embed_tokens.weight")
    {
        assert_eq!(observed.given[&name].moments.len(), width, "{name}");
    }
    assert_eq!(again.given, observed.given);
    assert!(moments.given.values().all(|g| g.hessian.is_none()));
    assert_eq!(moments.given[head].moments, observed.given[head].moments);
}

/// With another in the place of one weight, predictions diverge as the whole model run with it tells.
#[test]
fn costs_are_divergences() {
    for name in ["llama", "gemma3_text", "gpt2", "opt-350m"] {
        let row = rows(1, 24).remove(0);
        let (_, mut decoder) = open(name);
        let logs = |decoder: &Decoder| -> Vec<Vec<f64>> {
            let logits = decoder.forward(std::slice::from_ref(&row), None).unwrap().logits;
            let log = |l: &Vec<f32>| {
                let top = l.iter().copied().fold(f32::MIN, f32::max);
                let sum = l.iter().map(|v| f64::from(v - top).exp()).sum::<f64>().ln();
                l.iter().map(|v| f64::from(v - top) - sum).collect()
            };
            logits.squeeze(0).unwrap().to_vec2::<f32>().unwrap().iter().map(log).collect()
        };
        let other = |values: &[f32]| -> Vec<f32> {
            values.iter().enumerate().map(|(i, v)| v * (1.0 + 0.1 * ((i * i % 7) as f32 - 3.0))).collect()
        };
        let before = logs(&decoder);
        let (mut tables, every) = (Vec::new(), if name == "llama" { 1 } else { 3 });
        let costs = decoder.costs(&row, every, &mut |path, values, [out, width], looked_up| {
            assert_eq!(values.len(), out * width, "{path}");
            tables.extend(looked_up.then(|| path.to_string()));
            Ok(other(values))
        });
        let costs = costs.unwrap();
        assert_eq!(logs(&decoder), before, "{name}: the model is as it was");
        assert_eq!(tables.len(), 1, "{name}: {tables:?}");
        assert_eq!(costs.len(), decoder.weights().len(), "{name}");
        for (path, cost) in costs {
            let values = decoder.weight(&path).unwrap();
            let mut changed = decoder.clone();
            changed.replace(&path, other(&values)).unwrap();
            let after = logs(&changed);
            let predictions = [&decoder, &changed].map(|d| d.predictions(&row, every).unwrap());
            assert_eq!(predictions[0].divergence(&predictions[1]), cost, "{name} {path}");
            let one =
                |(p, q): (&Vec<f64>, &Vec<f64>)| p.iter().zip(q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
            let places = before.iter().zip(&after).rev().step_by(every);
            let (n, want) = (places.len() as f64, places.map(one).sum::<f64>());
            let want = want / n;
            assert!((cost - want).abs() < 1e-3 * want + 1e-6, "{name} {path}: {cost:e} for {want:e}");
        }
    }
}

#[test]
fn models_diverge_by_what_they_predict_for_each_row() {
    let (_, mut decoder) = open("gemma3_text");
    let rows = rows(2, 20);
    assert_eq!(decoder.divergence(&decoder, &rows, 1).unwrap(), 0.0);
    let mut changed = decoder.clone();
    for (name, _) in decoder.weights() {
        let values = decoder.weight(&name).unwrap();
        changed.replace(&name, values.iter().map(|v| (v * 16.0).round() / 16.0).collect()).unwrap();
    }
    let one = |row: &Vec<u32>| {
        let [before, after] = [&decoder, &changed].map(|d| d.predictions(row, 3).unwrap());
        before.divergence(&after)
    };
    let want = rows.iter().map(one).sum::<f64>() / 2.0;
    let found = decoder.divergence(&changed, &rows, 3).unwrap();
    assert!(want > 1e-4 && (found - want).abs() < 1e-9, "{found} for {want}");
}

#[test]
fn other_weights_take_the_place_of_the_models_own() {
    let (_, mut decoder) = open("llama");
    let row = rows(1, 12).remove(0);
    let surprise = |decoder: &Decoder| decoder.predictions(&row, 1).unwrap().surprise(&row).unwrap();
    let (before, n) = surprise(&decoder);
    assert_eq!(n, 11);
    let logits = decoder.forward(std::slice::from_ref(&row), None).unwrap().logits.squeeze(0).unwrap();
    let one = |(i, logits): (usize, &Vec<f32>)| {
        let all: f64 = logits.iter().map(|l| f64::from(*l).exp()).sum();
        all.ln() - f64::from(logits[row[i + 1] as usize])
    };
    let want: f64 = logits.to_vec2::<f32>().unwrap().iter().take(n).enumerate().map(one).sum();
    assert!((before - want).abs() < 1e-4, "{before} for {want}");
    let name = "model.layers.0.mlp.up_proj.weight";
    let weight = decoder.weight(name).unwrap();
    decoder.replace(name, weight.iter().map(|v| v * 2.0).collect()).unwrap();
    assert_ne!(surprise(&decoder).0, before);
    decoder.replace(name, weight.clone()).unwrap();
    assert_eq!(surprise(&decoder).0, before);
    let short = decoder.replace(name, vec![0.0; 3]).unwrap_err();
    assert!(short.message().contains("3 values for a weight"), "{short}");
    let unknown = decoder.replace("nothing.weight", weight).unwrap_err();
    assert_eq!(unknown.message(), "the model has no weight `nothing.weight`");
}
