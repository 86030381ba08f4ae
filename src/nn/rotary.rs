//! Rotary frequencies from a config, in double precision: default, linear, dynamic NTK, llama3, yarn and
//! longrope, over all of a head's channels or some.
//!
//! Formulas: [RoFormer](https://arxiv.org/abs/2104.09864), [YaRN](https://arxiv.org/abs/2309.00071),
//! [LongRoPE](https://arxiv.org/abs/2402.13753), and for llama3 the Llama 3.1 model card's code.

use std::f64::consts::PI;

use serde_json::Value as Json;

use crate::{
    bail,
    checkpoint::Config,
    error::{Error, Result},
};

/// How positions turn the channels of a head.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Channels of a head that are turned, the first ones.
    pub dims: usize,
    /// Angle per position of each pair.
    pub frequencies: Vec<f64>,
    /// Multiplies cosine and sine (yarn, longrope).
    pub factor: f64,
    /// Whether pairs are neighbours (2i, 2i+1) rather than halves (i, i + dims/2).
    pub interleaved: bool,
}

impl Rope {
    /// The rotation that a config asks for on `dims` channels, in a package of `context` positions.
    pub fn of(
        config: &Config,
        theta: f64,
        scaling: Option<&Json>,
        dims: usize,
        context: usize,
    ) -> Result<Rope> {
        if dims == 0 || !dims.is_multiple_of(2) {
            bail!("{}: {dims} rotary channels, an even number is expected", config.path().display());
        }
        let plain = frequencies(theta, dims);
        let s = Scaling { config, json: scaling };
        let (frequencies, factor) = match s.kind()? {
            "default" | "mrope" => (plain, 1.0),
            "linear" => {
                let factor = s.number("factor")?;
                (plain.iter().map(|f| f / factor).collect(), 1.0)
            }
            "dynamic" => {
                let longest = config.usize(&["max_position_embeddings"])?;
                if context > longest {
                    bail!(
                        "rope type `dynamic` changes its frequencies beyond {longest} positions, {context} are asked for";
                        hint: "`--context-length {longest}` is the longest that works"
                    );
                }
                (plain, 1.0)
            }
            "llama3" => (s.llama3(&plain)?, 1.0),
            "yarn" => s.yarn(&plain, theta, dims)?,
            "longrope" | "su" => s.longrope(&plain, context)?,
            other => {
                bail!("rope type `{other}` is not supported"; hint: "supported are default, linear, dynamic, llama3, yarn and longrope")
            }
        };
        Ok(Rope { dims, frequencies, factor, interleaved: false })
    }

    /// Rows `[context, 2 · dim]`: for each position the factors of a head's `dim` channels as they are,
    /// then those of the channels with the halves exchanged. Channels beyond the rotary ones keep
    /// themselves.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        reason = "positions and rounding"
    )]
    pub fn rows(&self, context: usize, dim: usize) -> Vec<f32> {
        let half = self.dims / 2;
        let mut rows = Vec::with_capacity(context * 2 * dim);
        for position in 0..context {
            let angle = |i: usize| position as f64 * self.frequencies[i % half];
            rows.extend((0..dim).map(|i| match i < self.dims {
                true => (angle(i).cos() * self.factor) as f32,
                false => 1.0,
            }));
            rows.extend((0..dim).map(|i| match i < self.dims {
                true => (angle(i).sin() * self.factor * if i < half { -1.0 } else { 1.0 }) as f32,
                false => 0.0,
            }));
        }
        rows
    }

    /// The order of a head's channels in which pairs are halves.
    pub fn order(&self, dim: usize) -> Vec<usize> {
        let half = self.dims / 2;
        (0..dim)
            .map(|i| match i {
                _ if !self.interleaved || i >= self.dims => i,
                _ if i < half => 2 * i,
                _ => 2 * (i - half) + 1,
            })
            .collect()
    }
}

/// theta^(−2i/dims)
#[expect(clippy::cast_precision_loss, reason = "small counts")]
fn frequencies(theta: f64, dims: usize) -> Vec<f64> {
    (0..dims / 2).map(|i| theta.powf(-2.0 * i as f64 / dims as f64)).collect()
}

/// `rope_scaling`, or the same in `rope_parameters`.
struct Scaling<'a> {
    config: &'a Config,
    json: Option<&'a Json>,
}

impl Scaling<'_> {
    fn kind(&self) -> Result<&str> {
        let Some(json) = self.json else { return Ok("default") };
        match json.get("rope_type").or_else(|| json.get("type")) {
            None => Ok("default"),
            Some(kind) => kind.as_str().ok_or_else(|| Error::new("the rope type is no string")),
        }
    }

    fn maybe(&self, key: &str) -> Option<f64> {
        self.json.and_then(|j| j.get(key)).and_then(Json::as_f64)
    }

    fn number(&self, key: &str) -> Result<f64> {
        match self.maybe(key) {
            Some(n) if n > 0.0 => Ok(n),
            _ => bail!("{}: the rope scaling has no `{key}` above 0", self.config.path().display()),
        }
    }

    fn original(&self) -> Result<f64> {
        #[expect(clippy::cast_precision_loss, reason = "a number of positions")]
        let from_config = |key: &str| self.config.opt_usize(&[key]).map(|n| n.map(|n| n as f64));
        match self.maybe("original_max_position_embeddings") {
            Some(n) => Ok(n),
            None => match from_config("original_max_position_embeddings")? {
                Some(n) => Ok(n),
                None => from_config("max_position_embeddings")?
                    .ok_or_else(|| Error::new("there is no original_max_position_embeddings")),
            },
        }
    }

    /// Long wavelengths are divided by the factor, short ones kept, those between blended.
    fn llama3(&self, plain: &[f64]) -> Result<Vec<f64>> {
        let (factor, original) = (self.number("factor")?, self.original()?);
        let (low, high) = (self.number("low_freq_factor")?, self.number("high_freq_factor")?);
        if high <= low {
            bail!("rope type `llama3`: high_freq_factor {high} is not above low_freq_factor {low}");
        }
        let scale = |f: &f64| {
            let wavelength = 2.0 * PI / f;
            if wavelength < original / high {
                return *f;
            }
            if wavelength > original / low {
                return f / factor;
            }
            let smooth = (original / wavelength - low) / (high - low);
            (1.0 - smooth) * f / factor + smooth * f
        };
        Ok(plain.iter().map(scale).collect())
    }

    #[expect(clippy::cast_precision_loss, reason = "small counts")]
    fn yarn(&self, plain: &[f64], theta: f64, dims: usize) -> Result<(Vec<f64>, f64)> {
        let (factor, original) = (self.number("factor")?, self.original()?);
        let (fast, slow) = (self.maybe("beta_fast").unwrap_or(32.0), self.maybe("beta_slow").unwrap_or(1.0));
        let dims = dims as f64;
        let turn = |turns: f64| dims * (original / (turns * 2.0 * PI)).ln() / (2.0 * theta.ln());
        let truncate = self.json.and_then(|j| j.get("truncate")).and_then(Json::as_bool).unwrap_or(true);
        let (mut low, mut high) = (turn(fast), turn(slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dims - 1.0));
        if low == high {
            high += 0.001;
        }
        let blend = |(i, f): (usize, &f64)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            f / factor * ramp + f * (1.0 - ramp)
        };
        let scale = |factor: f64, m: f64| if factor <= 1.0 { 1.0 } else { 0.1 * m * factor.ln() + 1.0 };
        let attention =
            match (self.maybe("attention_factor"), self.maybe("mscale"), self.maybe("mscale_all_dim")) {
                (Some(a), _, _) => a,
                (None, Some(m), Some(all)) if m > 0.0 && all > 0.0 => scale(factor, m) / scale(factor, all),
                _ => scale(factor, 1.0),
            };
        Ok((plain.iter().enumerate().map(blend).collect(), attention))
    }

    /// A factor of its own for each pair: the long ones where the context passes the original one.
    fn longrope(&self, plain: &[f64], context: usize) -> Result<(Vec<f64>, f64)> {
        let original = self.original()?;
        #[expect(clippy::cast_precision_loss, reason = "a number of positions")]
        let (context, longest) = (context as f64, self.config.usize(&["max_position_embeddings"])? as f64);
        let key = if context > original { "long_factor" } else { "short_factor" };
        let factors: Vec<f64> = self
            .json
            .and_then(|j| j.get(key))
            .and_then(Json::as_array)
            .map(|a| a.iter().filter_map(Json::as_f64).collect())
            .unwrap_or_default();
        if factors.len() != plain.len() {
            bail!(
                "rope type `longrope`: `{key}` has {} factors, {} are expected",
                factors.len(),
                plain.len()
            );
        }
        let stretch = self.maybe("factor").unwrap_or(longest / original);
        let attention = match self.maybe("attention_factor") {
            Some(a) => a,
            None if stretch <= 1.0 => 1.0,
            None => (1.0 + stretch.ln() / original.ln()).sqrt(),
        };
        Ok((plain.iter().zip(&factors).map(|(f, s)| f / s).collect(), attention))
    }
}
