//! Normalisation over the channel axis.

use half::f16;

use super::{Hidden, Net};
use crate::{
    error::Result,
    graph::In,
    mil::{Const, DType},
};

/// Below this a weight is no safe divisor in fp16: the smallest normal number.
const SMALLEST_NORMAL: f32 = 6.103_515_6e-5;
/// A quotient bias / weight above this could overflow once the activation is added.
const LARGEST_QUOTIENT: f32 = 3.0e4;

impl Net<'_> {
    /// LayerNorm with `name.weight` and, where there is one, `name.bias`, over the channels.
    ///
    /// The Neural Engine's form is (x + bias / weight) · weight. Where a weight is too small to divide by,
    /// it is x · weight + bias, the same numbers.
    pub fn layer_norm(&mut self, name: &str, eps: f64, x: Hidden) -> Result<Hidden> {
        let channels = self.channels(x)?;
        let shape = [1, channels, 1, 1];
        let y = self.normalise(name, eps, x)?;
        let weight = self.source(&format!("{name}.weight"))?;
        let scale = self.store(&weight, "", shape, Ok);
        if !self.has(&format!("{name}.bias")) {
            return Ok(Hidden(self.binary("mul", &format!("{name}_mul"), y, scale)?));
        }
        let bias = self.source(&format!("{name}.bias"))?;
        let (w, b) = (weight.floats()?, bias.floats()?);
        if w.iter().zip(&b).all(|(w, b)| w.abs() >= SMALLEST_NORMAL && (b / w).abs() <= LARGEST_QUOTIENT) {
            let half = self.float == DType::F16;
            let shift = self.store(&bias, &format!("÷ {}", weight.key), shape, move |b| {
                // Divide by the weight as it is stored, so that multiplying takes it back.
                let stored = |w: f32| if half { f16::from_f32(w).to_f32() } else { w };
                Ok(b.iter().zip(&w).map(|(b, w)| b / stored(*w)).collect())
            });
            let y = self.binary("add", &format!("{name}_add"), y, shift)?;
            return Ok(Hidden(self.binary("mul", &format!("{name}_mul"), y, scale)?));
        }
        let y = self.binary("mul", &format!("{name}_mul"), y, scale)?;
        let shift = self.store(&bias, "", shape, Ok);
        Ok(Hidden(self.binary("add", &format!("{name}_add"), y, shift)?))
    }

    /// (x − mean) / √(variance + eps) over the channels.
    fn normalise(&mut self, name: &str, eps: f64, x: Hidden) -> Result<Hidden> {
        let eps = self.epsilon(eps);
        Ok(Hidden(self.op("layer_norm", name, [("x", x.into()), ("axes", [1].into()), ("epsilon", eps)])?))
    }

    /// An epsilon that fp16 holds: one that would round to zero becomes the smallest number above it, so
    /// that a constant row still divides by something.
    pub fn epsilon(&self, eps: f64) -> In {
        #[expect(clippy::cast_possible_truncation, reason = "an epsilon needs no more than 32 bits")]
        let eps = eps as f32;
        match self.float {
            DType::F16 => Const::float(DType::F16, eps.max(f16::from_bits(1).to_f32())).into(),
            other => Const::float(other, eps).into(),
        }
    }
}
