//! Rotary positions: inverse frequencies by the kinds of scaling that Transformers knows, in f64.

use std::f64::consts::PI;

use candle_core::{D, Device, Tensor};
use serde_json::Value;

use crate::{
    bail,
    checkpoint::Config,
    error::{Context, Result},
};

#[derive(Clone)]
pub(super) struct Rope {
    /// Channels of a head that are rotated.
    width: usize,
    theta: f64,
    scaling: Scaling,
    /// Neighbours are rotated together, not the two halves.
    pairs: bool,
}

#[derive(Clone)]
enum Scaling {
    Default,
    Linear { factor: f64 },
    Dynamic { factor: f64, longest: f64 },
    Llama3 { factor: f64, low: f64, high: f64, original: f64 },
    Yarn { factor: f64, ramp: [f64; 2], attention: f64 },
    LongRope { short: Vec<f64>, long: Vec<f64>, original: f64, attention: f64 },
}

impl Rope {
    /// The rotary positions of `config`, in the form of version 4 of Transformers or of version 5, for heads
    /// of `head` channels.
    pub(super) fn read(config: &Config, theta: f64, part: f64, head: usize, pairs: bool) -> Result<Rope> {
        let parameters = match config.nested("rope_parameters") {
            Some(p) => Some(p.nested("full_attention").unwrap_or(p)),
            None => config.nested("rope_scaling"),
        };
        let both = |keys: &[&str], default: f64| match parameters.as_ref().map(|p| p.opt_f64(keys)) {
            Some(Ok(None)) | None => config.f64_or(keys, default),
            Some(seen) => seen.map(|n| n.unwrap_or(default)),
        };
        let theta = both(&["rope_theta", "rotary_emb_base"], theta)?;
        let part = both(&["partial_rotary_factor", "rotary_pct"], part)?;
        Rope::new(config, parameters.as_ref(), theta, part, head, pairs)
    }

    /// Those of Gemma 3's layers with a window.
    pub(super) fn read_local(config: &Config, head: usize) -> Result<Rope> {
        let parameters = config.nested("rope_parameters").and_then(|p| p.nested("sliding_attention"));
        let theta = match &parameters {
            Some(p) => p.f64_or(&["rope_theta"], 1e4)?,
            None => config.f64_or(&["rope_local_base_freq"], 1e4)?,
        };
        Rope::new(config, parameters.as_ref(), theta, 1.0, head, false)
    }

    fn new(
        config: &Config,
        parameters: Option<&Config>,
        theta: f64,
        part: f64,
        head: usize,
        pairs: bool,
    ) -> Result<Rope> {
        let place = config.path().display();
        if !(theta > 0.0 && theta.is_finite() && part > 0.0 && part <= 1.0) {
            bail!("{place}: a rotary base of {theta} on {part} of a head, expected more than 0, and 0 to 1");
        }
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "rounded down as Transformers does, between 0 and the width of a head"
        )]
        let width = (head as f64 * part) as usize;
        if width == 0 || !width.is_multiple_of(2) {
            bail!("{place}: {width} of a head's {head} channels cannot be rotated in pairs");
        }
        let scaling = match parameters {
            Some(p) => Scaling::read(config, p, theta, width)?,
            None => Scaling::Default,
        };
        Ok(Rope { width, theta, scaling, pairs })
    }

    /// Cosines and sines, `[length, width / 2]`.
    pub(super) fn tables(&self, length: usize) -> Result<(Tensor, Tensor)> {
        let (frequencies, attention) = (self.frequencies(length), self.scaling.attention());
        #[expect(clippy::cast_precision_loss, reason = "positions are small")]
        let angles: Vec<f64> =
            (0..length).flat_map(|p| frequencies.iter().map(move |f| p as f64 * f)).collect();
        #[expect(clippy::cast_possible_truncation, reason = "computed in f64 and used in f32")]
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f32> = angles.iter().map(|a| (f(*a) * attention) as f32).collect();
            Tensor::from_vec(values, (length, self.width / 2), &Device::Cpu)
        };
        Ok((table(f64::cos)?, table(f64::sin)?))
    }

    /// Rotates the first channels of `[batch, heads, sequence, channels]`.
    pub(super) fn rotate(&self, x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
        let (batch, heads, sequence, channels) = x.dims4()?;
        let turned = x.narrow(D::Minus1, 0, self.width)?;
        let half = self.width / 2;
        let (a, b) = if self.pairs {
            let pairs = turned.contiguous()?.reshape((batch, heads, sequence, half, 2))?;
            (
                pairs.narrow(D::Minus1, 0, 1)?.squeeze(D::Minus1)?,
                pairs.narrow(D::Minus1, 1, 1)?.squeeze(D::Minus1)?,
            )
        } else {
            (turned.narrow(D::Minus1, 0, half)?, turned.narrow(D::Minus1, half, half)?)
        };
        let c = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
        let d = (b.broadcast_mul(cos)? + a.broadcast_mul(sin)?)?;
        let turned = if self.pairs {
            Tensor::stack(&[c, d], D::Minus1)?.reshape((batch, heads, sequence, self.width))?
        } else {
            Tensor::cat(&[c, d], D::Minus1)?
        };
        if self.width == channels {
            return Ok(turned);
        }
        Ok(Tensor::cat(&[&turned, &x.narrow(D::Minus1, self.width, channels - self.width)?], D::Minus1)?)
    }

    /// One for each pair of channels, for a sequence of `length` tokens.
    #[expect(clippy::cast_precision_loss, reason = "lengths and widths are small")]
    fn frequencies(&self, length: usize) -> Vec<f64> {
        let (width, length) = (self.width as f64, length as f64);
        let plain = |theta: f64| {
            (0..self.width / 2).map(move |i| theta.powf(-2.0 * i as f64 / width)).collect::<Vec<f64>>()
        };
        let scaled = |f: &dyn Fn(usize, f64) -> f64| {
            plain(self.theta).into_iter().enumerate().map(|(i, x)| f(i, x)).collect()
        };
        match &self.scaling {
            Scaling::Default => plain(self.theta),
            Scaling::Linear { factor } => scaled(&|_, x| x / factor),
            Scaling::Dynamic { factor, longest } => {
                let stretch = factor * length.max(*longest) / longest - (factor - 1.0);
                plain(self.theta * stretch.powf(width / (width - 2.0)))
            }
            Scaling::Llama3 { factor, low, high, original } => scaled(&|_, x| {
                let turns = original * x / (2.0 * PI);
                let keep = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                x * keep + x / factor * (1.0 - keep)
            }),
            Scaling::Yarn { factor, ramp: [low, high], .. } => scaled(&|i, x| {
                let stretch = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                x / factor * stretch + x * (1.0 - stretch)
            }),
            Scaling::LongRope { short, long, original, .. } => {
                let factors = if length > *original { long } else { short };
                scaled(&|i, x| x / factors[i])
            }
        }
    }
}

impl Scaling {
    fn read(config: &Config, p: &Config, theta: f64, width: usize) -> Result<Scaling> {
        let kind = match p.opt_str(&["rope_type", "type"])? {
            Some(kind) => kind,
            None if p.get(&["factor"]).is_some() => p.str(&["rope_type", "type"])?,
            None => "default",
        };
        let long = p.get(&["long_factor"]).is_some();
        let read = match kind {
            "default" => Ok(Scaling::Default),
            "linear" => Ok(Scaling::Linear { factor: p.f64(&["factor"])? }),
            "dynamic" => {
                let longest = config.f64(&["max_position_embeddings"])?;
                Ok(Scaling::Dynamic { factor: p.f64(&["factor"])?, longest })
            }
            "llama3" => Ok(Scaling::Llama3 {
                factor: p.f64(&["factor"])?,
                low: p.f64(&["low_freq_factor"])?,
                high: p.f64(&["high_freq_factor"])?,
                original: original(config, p)?,
            }),
            // Phi-3's first configs call it `su` or `yarn`.
            "longrope" | "su" => longrope(config, p, width),
            "yarn" if long => longrope(config, p, width),
            "yarn" => yarn(config, p, theta, width),
            _ => Err(p.wrong("rope_type", "default, linear, dynamic, llama3, yarn or longrope")),
        };
        let scaling = read.within(|| format!("while reading rotary positions of type `{kind}`"))?;
        if !scaling.sane(width) {
            bail!(
                "{}: rotary positions of type `{kind}` have a number that is out of range",
                config.path().display()
            );
        }
        Ok(scaling)
    }

    fn attention(&self) -> f64 {
        match self {
            Scaling::Yarn { attention, .. } | Scaling::LongRope { attention, .. } => *attention,
            _ => 1.0,
        }
    }

    /// Whether nothing is divided by zero.
    fn sane(&self, width: usize) -> bool {
        let positive = |x: &f64| *x > 0.0 && x.is_finite();
        match self {
            Scaling::Default => true,
            Scaling::Linear { factor } => positive(factor),
            Scaling::Dynamic { factor, longest } => positive(factor) && positive(longest) && width > 2,
            Scaling::Llama3 { factor, low, high, original } => {
                [factor, low, original].into_iter().all(positive) && high > low
            }
            Scaling::Yarn { factor, ramp: [low, high], attention } => {
                positive(factor) && attention.is_finite() && high > low
            }
            Scaling::LongRope { short, long, original, attention } => {
                short.iter().chain(long).all(positive) && positive(original) && attention.is_finite()
            }
        }
    }
}

/// The length that the model was first trained for.
fn original(config: &Config, p: &Config) -> Result<f64> {
    let key = "original_max_position_embeddings";
    match config.opt_f64(&[key])? {
        Some(n) => Ok(n),
        None => p.opt_f64(&[key])?.map_or_else(|| config.f64(&["max_position_embeddings"]), Ok),
    }
}

/// How many times longer than that it is to be.
fn stretch(config: &Config, p: &Config) -> Result<f64> {
    match p.opt_f64(&["factor"])? {
        Some(factor) => Ok(factor),
        None => Ok(config.f64(&["max_position_embeddings"])? / original(config, p)?),
    }
}

#[expect(clippy::cast_precision_loss, reason = "widths are small")]
fn yarn(config: &Config, p: &Config, theta: f64, width: usize) -> Result<Scaling> {
    let (factor, original) = (stretch(config, p)?, original(config, p)?);
    let scale = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
    let nonzero = |key: &str| p.opt_f64(&[key]).map(|n| n.filter(|n| *n != 0.0));
    let attention = match (p.opt_f64(&["attention_factor"])?, nonzero("mscale")?, nonzero("mscale_all_dim")?)
    {
        (Some(attention), ..) => attention,
        (None, Some(one), Some(all)) => scale(one) / scale(all),
        _ => scale(1.0),
    };
    let width = width as f64;
    let dimension = |turns: f64| width * (original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
    let low = dimension(nonzero("beta_fast")?.unwrap_or(32.0));
    let high = dimension(nonzero("beta_slow")?.unwrap_or(1.0));
    let (low, high) = if p.bool_or(&["truncate"], true)? { (low.floor(), high.ceil()) } else { (low, high) };
    let (low, mut high) = (low.max(0.0), high.min(width - 1.0));
    if low == high {
        high += 0.001;
    }
    Ok(Scaling::Yarn { factor, ramp: [low, high], attention })
}

fn longrope(config: &Config, p: &Config, width: usize) -> Result<Scaling> {
    let (factor, original) = (stretch(config, p)?, original(config, p)?);
    let attention = match p.opt_f64(&["attention_factor"])? {
        Some(attention) => attention,
        None if factor <= 1.0 => 1.0,
        None => (1.0 + factor.ln() / original.ln()).sqrt(),
    };
    let factors = |key: &str| {
        let numbers = p.get(&[key]).and_then(Value::as_array);
        let numbers: Option<Vec<f64>> = numbers.and_then(|n| n.iter().map(Value::as_f64).collect());
        numbers
            .filter(|n| n.len() == width / 2)
            .ok_or_else(|| p.wrong(key, &format!("{} numbers, one for each pair of channels", width / 2)))
    };
    Ok(Scaling::LongRope {
        short: factors("short_factor")?,
        long: factors("long_factor")?,
        original,
        attention,
    })
}
