//! Our reference against what Transformers computed.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use safetensors::SafeTensors;
use silane::{
    checkpoint::Checkpoint,
    reference::{Inputs, encoder},
};

#[test]
fn agrees_with_transformers() {
    let names = [
        "tiny/bert",
        "tiny/bert-cls",
        "tiny/bert-mlm",
        "tiny/distilbert",
        "tiny/distilbert-cls",
        "tiny/distilbert-tokens",
        "tiny/roberta",
        "tiny/roberta-mlm",
        "tiny/xlm-roberta",
        "tiny/mpnet",
        "tiny/electra",
        "tiny/electra-discriminator",
        "tiny/albert",
        "tiny/albert-groups",
        "tiny/modernbert",
        "tiny/modernbert-mlm",
        "rxn-albert-mlm",
    ];
    for name in names {
        let dir = models().join(name);
        let worst = worst(&dir, &dir.join("reference.safetensors"));
        println!("{name}: {worst:.1e}");
        assert!(worst < 1e-5, "{name}: {worst:e} of the spread");
    }
}

fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models")
}

struct Stored {
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Stored {
    fn floats(&self) -> Vec<f32> {
        self.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    fn rows(&self) -> Vec<Vec<u32>> {
        let ids: Vec<u32> = self
            .bytes
            .as_chunks::<8>()
            .0
            .iter()
            .map(|b| u32::try_from(i64::from_le_bytes(*b)).unwrap())
            .collect();
        ids.chunks(self.shape[1]).map(<[u32]>::to_vec).collect()
    }
}

fn stored(path: &Path) -> BTreeMap<String, Stored> {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors();
    tensors
        .into_iter()
        .map(|(name, t)| (name, Stored { shape: t.shape().to_vec(), bytes: t.data().to_vec() }))
        .collect()
}

/// The largest difference over all outputs, relative to the spread of the output; padding is left out.
fn worst(dir: &Path, reference: &Path) -> f32 {
    let stored = stored(reference);
    let inputs = Inputs {
        input_ids: stored["input_ids"].rows(),
        attention_mask: stored["attention_mask"].rows(),
        token_type_ids: stored.get("token_type_ids").map(Stored::rows),
    };
    let checkpoint = Checkpoint::open(dir.to_str().unwrap()).unwrap();
    let task = checkpoint.task().unwrap();
    let mut outputs = encoder(&checkpoint, task, &inputs).unwrap();
    if let Some(embedding) = outputs.remove("embedding") {
        outputs.insert("sentence_embedding".into(), embedding);
    }
    let known = ["last_hidden_state", "pooler_output", "logits", "sentence_embedding"];
    let expected: Vec<_> = stored.iter().filter(|(name, _)| known.contains(&name.as_str())).collect();
    assert!(!expected.is_empty());
    let compare = |(name, want): &(&String, &Stored)| {
        let got = outputs.get(*name).unwrap_or_else(|| panic!("{}: no {name}", dir.display()));
        assert_eq!(got.dims(), want.shape, "{}: {name}", dir.display());
        let got = got.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        difference(&got, &want.floats(), &want.shape, &inputs.attention_mask)
    };
    expected.iter().map(compare).fold(0.0, f32::max)
}

fn difference(got: &[f32], want: &[f32], shape: &[usize], mask: &[Vec<u32>]) -> f32 {
    let real: Vec<bool> = mask.iter().flatten().map(|m| *m != 0).collect();
    let by_token = shape.len() > 1 && shape[0] * shape[1] == real.len();
    let each = if by_token { got.len() / real.len() } else { 1 };
    let kept = |i: usize| !by_token || real[i / each];
    let pairs: Vec<(f32, f32)> =
        got.iter().zip(want).enumerate().filter(|(i, _)| kept(*i)).map(|(_, (a, b))| (*a, *b)).collect();
    let (low, high) = pairs.iter().fold((f32::MAX, f32::MIN), |(l, h), (_, w)| (l.min(*w), h.max(*w)));
    pairs.iter().map(|(g, w)| if g.is_nan() { f32::INFINITY } else { (g - w).abs() }).fold(0.0, f32::max)
        / (high - low)
}
