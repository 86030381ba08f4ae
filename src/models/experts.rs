//! What a mixture of experts costs here: all experts are computed for every token, the router's choice only
//! weighs them.

use std::collections::BTreeSet;

use serde_json::{Value as Json, json};

use super::{Frame, decoder::text_config, find};
use crate::{
    checkpoint::{Checkpoint, Config},
    error::Result,
};

/// What the router chooses from.
#[derive(Debug, Clone, Copy)]
pub struct Routed {
    pub count: usize,
    pub chosen: usize,
}

impl Routed {
    pub(super) fn of(config: &Config, count: &str) -> Result<Routed> {
        Ok(Routed { count: config.usize(&[count])?, chosen: config.usize(&["num_experts_per_tok"])? })
    }
}

/// The weights that a token's layers and head read.
#[derive(Debug, Clone, Copy)]
pub struct Mixture {
    pub routed: Routed,
    /// Layers that have experts.
    pub layers: usize,
    /// Elements of all experts' weights.
    pub experts: u64,
    /// Elements of all other weights, an embedding that is only looked up in left out.
    pub others: u64,
}

impl Mixture {
    /// Of a checkpoint that is read as `model_type`; nothing where its layers have no experts.
    pub fn of(checkpoint: &Checkpoint, model_type: &str) -> Result<Option<Mixture>> {
        let Frame::Decoder(decoder) = &find(model_type)?.frame else { return Ok(None) };
        let Some(routed) = decoder.routed else { return Ok(None) };
        let mut mixture =
            Mixture { routed: routed(&text_config(checkpoint))?, layers: 0, experts: 0, others: 0 };
        let head = checkpoint.tensors.contains("lm_head.weight");
        let mut layers = BTreeSet::new();
        for name in checkpoint.tensors.names() {
            let shape = checkpoint.tensors.get(name).map(|info| info.shape.as_slice());
            let elements = shape.unwrap_or(&[]).iter().map(|d| *d as u64).product::<u64>();
            if let Some((layer, _)) = name.split_once(".experts.") {
                layers.insert(layer);
                mixture.experts += elements;
            } else if !(head && name.ends_with("embed_tokens.weight")) {
                mixture.others += elements;
            }
        }
        mixture.layers = layers.len();
        Ok((mixture.layers > 0).then_some(mixture))
    }

    /// Elements that the router's choice would read.
    pub fn chosen(&self) -> u64 {
        let (count, chosen) = (self.routed.count.max(1) as u64, self.routed.chosen as u64);
        self.experts / count * chosen + self.others
    }

    pub fn computed(&self) -> u64 {
        self.experts + self.others
    }

    pub fn json(&self) -> Json {
        json!({
            "computed": self.routed.count,
            "chosen": self.routed.chosen,
            "layers": self.layers,
            "factor": ratio(self.routed.count as u64, self.routed.chosen as u64),
            "parameters_computed": self.computed(),
            "parameters_chosen": self.chosen(),
            "factor_of_all": ratio(self.computed(), self.chosen()),
        })
    }
}

#[expect(clippy::cast_precision_loss, reason = "two digits are shown")]
fn ratio(all: u64, some: u64) -> f64 {
    all as f64 / some.max(1) as f64
}
