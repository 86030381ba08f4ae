//! Where a language model leaves its reference: hidden states after each layer, token by token.

use std::collections::BTreeMap;

use serde_json::json;

use super::{session::Model, validate::Precise};
use crate::{
    checkpoint::Checkpoint, error::Result, interp::compare::compare, models, ops::Val, reference::Decoder,
};

/// The least cosine of each layer's hidden states. A cosine minds no scale, and some packages keep their
/// stream smaller than the checkpoint's.
pub(super) struct Layers(Vec<f64>);

/// What fp16 leaves of a deep model is nearer than this, and what a wrong layer leaves is not.
const NEAR: f64 = 0.999;

impl Layers {
    /// Compares after each token; `None` where the package's values do not tell of every layer.
    pub(super) fn compare(
        model: &Model,
        checkpoint: &Checkpoint,
        ids: &[u32],
        precision: Precise,
    ) -> Result<Option<Layers>> {
        let reference = match model.rotated_family() {
            Some(family) => Decoder::open(&models::rotated(checkpoint, family)?.checkpoint)?,
            None => Decoder::open(checkpoint)?,
        };
        let taps = reference.forward(&[ids.to_vec()], None)?.taps;
        let [_, expected @ ..] = taps.as_slice() else { return Ok(None) };
        let mut session = model.session(precision.into())?;
        let mut least = BTreeMap::new();
        for (t, id) in ids.iter().enumerate().take(session.context) {
            for (layer, seen) in session.decode_layers(*id)? {
                let Some(expected) = expected.get(layer) else { return Ok(None) };
                let expected: Vec<f32> = expected.get(0)?.get(t)?.to_vec1()?;
                let near: &mut f64 = least.entry(layer).or_insert(1.0);
                *near = near.min(cosine(&seen, &expected)?);
            }
        }
        let complete = !expected.is_empty() && least.len() == expected.len();
        Ok(complete.then(|| Layers(least.into_values().collect())))
    }

    fn first_off(&self) -> Option<usize> {
        self.0.iter().position(|cosine| *cosine < NEAR)
    }

    pub(super) fn text(&self) -> String {
        match self.first_off() {
            Some(i) => format!("first layer off: {i} (cosine {:.7})", self.0[i]),
            None => {
                let least = self.0.iter().copied().fold(1.0, f64::min);
                format!(
                    "no layer of decode is off (least cosine {least:.7}): look at the head and at prefill"
                )
            }
        }
    }

    pub(super) fn json(&self) -> serde_json::Value {
        json!({ "first_off": self.first_off(), "cosines": self.0 })
    }
}

/// The layer that a value is named after: `model_layers_3_mlp_down_proj`, `transformer_h_3_add`.
fn layer_of(name: &str) -> Option<usize> {
    let words: Vec<&str> = name.split('_').collect();
    let place = words.iter().position(|w| matches!(*w, "layers" | "h"))?;
    words.get(place + 1)?.parse().ok()
}

/// Values that are not finite are as far off as can be.
fn cosine(seen: &[f32], expected: &[f32]) -> Result<f64> {
    if seen.len() != expected.len() || seen.iter().any(|v| !v.is_finite()) {
        return Ok(0.0);
    }
    Ok(compare(seen, expected, 1.0)?.cosine)
}

/// The last value of each layer, as an interpreter's tap sees them.
pub(super) struct Seen {
    tokens: usize,
    values: BTreeMap<usize, Val>,
}

impl Seen {
    /// For a call of so many tokens.
    pub(super) fn of(tokens: usize) -> Seen {
        Seen { tokens, values: BTreeMap::new() }
    }

    pub(super) fn see(&mut self, name: &str, value: &Val) {
        // An update of the cache is no hidden state.
        let hidden =
            |v: &Val| v.tensor().is_ok_and(|t| matches!(t.dims(), [1, _, 1, n] if *n == self.tokens));
        if let Some(layer) = layer_of(name).filter(|_| hidden(value)) {
            self.values.insert(layer, value.clone());
        }
    }

    pub(super) fn floats(self) -> Result<BTreeMap<usize, Vec<f32>>> {
        self.values.into_iter().map(|(layer, value)| Ok((layer, value.to_floats()?))).collect()
    }
}
