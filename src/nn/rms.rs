//! RMSNorm over the channel axis, in a form that neither overflows nor loses epsilon in fp16.
//!
//! There is no such op in Core ML, and squaring x overflows from 256 on. The mean of `[x, −x, e, −e]` is
//! zero and its variance is (Σx² + e²) / (C + 1), so `layer_norm` over it, which sums in 32 bits, gives
//! x / √(Σx²/C + ε) up to the constant √((C + 1)/C), once e = √(C·ε). That constant goes into the weight.

use super::{Hidden, Net};
use crate::{
    error::Result,
    graph::In,
    mil::{Const, DType, ValueId, Weight},
};

/// A norm's place and constants.
#[derive(Debug, Clone, Copy)]
pub struct Rms<'a> {
    pub name: &'a str,
    pub eps: f64,
    /// Added to each weight: 1 for Gemma's.
    pub plus: f32,
    /// How much smaller the input is than the checkpoint's.
    pub input: f32,
    /// Multiplies the result.
    pub output: f32,
}

impl<'a> Rms<'a> {
    pub fn new(name: &'a str, eps: f64) -> Self {
        Self { name, eps, plus: 0.0, input: 1.0, output: 1.0 }
    }
}

impl Net<'_> {
    /// RMSNorm of the residual stream, with `name.weight`.
    pub fn rms_norm(&mut self, name: &str, eps: f64, x: Hidden) -> Result<Hidden> {
        let input = self.residual;
        self.rms(Rms { input, ..Rms::new(name, eps) }, x)
    }

    pub fn rms(&mut self, norm: Rms<'_>, x: Hidden) -> Result<Hidden> {
        let channels = self.channels(x)?;
        let weight = self.source(&format!("{}.weight", norm.name))?;
        if weight.shape != [channels] {
            crate::bail!(
                "{}.weight: {:?} does not fit {channels} channels",
                self.place(norm.name),
                weight.shape
            );
        }
        let factor = norm.output * correction(channels, channels);
        let how = format!("(w + {}) × {factor}, mirrored", norm.plus);
        let gamma = self.store(&weight, &how, [2 * channels + 2], move |w| {
            let tail = std::iter::repeat_n(0.0, w.len() + 2);
            Ok(w.iter().map(|w| (w + norm.plus) * factor).chain(tail).collect())
        });
        let y = self.mirrored_norm(norm.name, x.0, channels, norm.eps, norm.input, Some(gamma))?;
        Ok(Hidden(y))
    }

    /// x / √(mean of squares + eps) over axis 1, of which `width` channels are real and the rest zeros;
    /// smaller by [`correction`], for the caller to fold into what is multiplied next.
    pub(super) fn mirrored_norm(
        &mut self,
        name: &str,
        x: ValueId,
        width: usize,
        eps: f64,
        input: f32,
        gamma: Option<Weight>,
    ) -> Result<ValueId> {
        let shape = self.builder.shape(x)?;
        let channels = shape[1];
        let minus = self.binary("mul", &format!("{name}_minus"), x, self.scalar(-1.0))?;
        let epsilon = self.mirror_epsilon(width, channels, eps, input);
        let pair = self.constant(
            &format!("epsilon pair {epsilon:e}"),
            &[shape[0], 2, shape[2], shape[3]],
            pair_values(epsilon, &shape),
        );
        let values = [x.into(), minus.into(), pair].into_iter().flat_map(In::into_args).collect::<Vec<_>>();
        let mirror =
            self.op("concat", &format!("{name}_mirror"), [("values", In::from(values)), ("axis", 1.into())])?;
        let normed = self.op(
            "layer_norm",
            &format!("{name}_norm"),
            [
                ("x", mirror.into()),
                ("axes", [1].into()),
                ("gamma", gamma.into()),
                ("epsilon", Const::float(self.float, self.smallest_epsilon()).into()),
            ],
        )?;
        let size: Vec<i32> = shape.iter().map(|d| i32::try_from(*d).unwrap_or(i32::MAX)).collect();
        self.op(
            "slice_by_size",
            name,
            [("x", normed.into()), ("begin", [0, 0, 0, 0].into()), ("size", In::from(size.as_slice()))],
        )
    }

    /// The e that makes epsilon exact, less what the op's own epsilon adds.
    fn mirror_epsilon(&self, width: usize, channels: usize, eps: f64, input: f32) -> f32 {
        #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "small counts")]
        let e = {
            let wanted = width as f64 * eps * f64::from(input).powi(2);
            (wanted - f64::from(self.smallest_epsilon()) * (channels + 1) as f64).max(0.0).sqrt() as f32
        };
        e
    }

    fn smallest_epsilon(&self) -> f32 {
        if self.float == DType::F16 { half::f16::from_bits(1).to_f32() } else { 1e-12 }
    }
}

/// √(width / (channels + 1)): what a mirrored norm is to be multiplied by.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "small counts")]
pub(super) fn correction(width: usize, channels: usize) -> f32 {
    (width as f64 / (channels as f64 + 1.0)).sqrt() as f32
}

/// `[e, −e]` along axis 1 of `[B, 2, H, W]`.
fn pair_values(e: f32, shape: &[usize]) -> Vec<f32> {
    let inner = shape[2] * shape[3];
    (0..shape[0] * 2 * inner).map(|i| if (i / inner).is_multiple_of(2) { e } else { -e }).collect()
}
