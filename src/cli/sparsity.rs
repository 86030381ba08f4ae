//! `silane validate --text` on a package with block-sparse prefill: what leaving blocks to their means costs.
//!
//! Each chunk of the text that may be prefilled so is, and by the exact function too, from the same cache;
//! the text then goes on from the block-sparse one's.

use std::path::Path;

use serde_json::json;

use super::{
    session::{Model, Step},
    validate::Precise,
};
use crate::{
    checkpoint::Checkpoint,
    error::{Result, io},
    interp::compare::{divergence, top_k},
};

/// Block-sparse against exact prefill.
pub(super) struct Sparsity {
    chunks: usize,
    /// Keys attended to exactly, as a share of those that dense attention sees.
    density: f64,
    /// Of each layer's hidden states: the error in L2, relative to the exact ones.
    layers: Vec<f64>,
    /// Of the last token of each chunk: the divergence in nats, and how many have the same best token.
    divergence: f64,
    same: usize,
}

impl Sparsity {
    /// `None` where the package has no such function, or the text is too short for it.
    pub(super) fn measure(
        model: &Model,
        checkpoint: &Checkpoint,
        file: &Path,
        precision: Precise,
    ) -> Result<Option<Sparsity>> {
        let mut session = model.session(precision.into())?;
        let text = std::fs::read_to_string(file).map_err(|e| io(file, &e))?;
        let ids = checkpoint.tokenizer()?.encode_cut(&text, session.context)?.ids;
        let (mut kept, mut visible) = (0.0, 0.0);
        let mut all = Sparsity { chunks: 0, density: 0.0, layers: Vec::new(), divergence: 0.0, same: 0 };
        while let Some(step) = session.step(&ids)? {
            let Step::Both { exact, sparse, kept: k, visible: v } = step else { continue };
            let (a, b) = (sparse.scores.logits()?, exact.scores.logits()?);
            all.chunks += 1;
            all.divergence += divergence(a, b, a.len())?;
            all.same += usize::from(top_k(a, b, a.len(), 1)? > 0.0);
            kept += k;
            visible += v;
            for (layer, seen) in &sparse.layers {
                let Some(expected) = exact.layers.get(layer) else { continue };
                all.layers.resize(all.layers.len().max(layer + 1), 0.0);
                all.layers[*layer] += off(seen, expected);
            }
        }
        #[expect(clippy::cast_precision_loss, reason = "few chunks")]
        let n = all.chunks as f64;
        all.divergence /= n;
        all.layers.iter_mut().for_each(|e| *e /= n);
        all.density = kept / visible;
        Ok((all.chunks > 0).then_some(all))
    }

    pub(super) fn text(&self) -> String {
        let layers: Vec<String> = self.layers.iter().map(|e| format!("{:.1}", 100.0 * e)).collect();
        format!(
            "block-sparse prefill of {} chunks against exact prefill: {:.1} % of the keys, KL divergence {:.2e}, same best token after {} of them\n     error of the hidden states by layer, in %: {}",
            self.chunks,
            100.0 * self.density,
            self.divergence,
            self.same,
            layers.join(" ")
        )
    }

    pub(super) fn json(&self) -> serde_json::Value {
        json!({
            "chunks": self.chunks, "density": self.density, "kl": self.divergence, "same_best": self.same,
            "layer_errors": self.layers,
        })
    }
}

/// The L2 norm of the difference, relative to that of what was expected.
fn off(seen: &[f32], expected: &[f32]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>().sqrt();
    let difference = norm(&mut seen.iter().zip(expected).map(|(a, b)| f64::from(a - b)));
    difference / norm(&mut expected.iter().map(|v| f64::from(*v))).max(f64::MIN_POSITIVE)
}
