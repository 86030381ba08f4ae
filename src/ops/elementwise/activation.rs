//! Activation functions.

use candle_core::cpu::erf::erf_f64;

use super::{FLOATS, channels, each, each_of, scaled, unary};
use crate::{
    bail,
    error::Result,
    ops::{FLOAT, Param, Preset, STRING, Spec, args::named, fixed, need, one, written},
};

pub(super) static RELU: Spec = unary("relu", FLOATS, 1, |x| each(x, |v| if v < 0.0 { 0.0 } else { v }));
pub(super) static RELU6: Spec = unary("relu6", FLOATS, 1, |x| each(x, |v| v.clamp(0.0, 6.0)));
pub(super) static SIGMOID: Spec = unary("sigmoid", FLOATS, 4, |x| each(x, sigmoid));
pub(super) static SILU: Spec = unary("silu", FLOATS, 4, |x| each(x, |v| v * sigmoid(v)));
pub(super) static TANH: Spec = unary("tanh", FLOATS, 4, |x| each(x, f32::tanh));
pub(super) static SOFTPLUS: Spec = unary("softplus", FLOATS, 8, |x| each(x, softplus));
pub(super) static SOFTSIGN: Spec = unary("softsign", FLOATS, 4, |x| each(x, |v| v / (1.0 + v.abs())));

pub(super) static GELU: Spec = Spec {
    infer: |a| match a.str_or("mode", "EXACT") {
        "EXACT" | "TANH_APPROXIMATION" | "SIGMOID_APPROXIMATION" => a.like("x"),
        other => {
            bail!("`mode` is `{other}`"; hint: "EXACT, TANH_APPROXIMATION and SIGMOID_APPROXIMATION are possible")
        }
    },
    ..scaled("gelu", &[need("x", FLOAT), written("mode", STRING, Preset::Str("EXACT"))], |c| {
        let f = match c.str_or("mode", "EXACT") {
            "TANH_APPROXIMATION" => {
                |v: f32| 0.5 * v * (1.0 + (SQRT_2_PI * (v + 0.044_715 * v * v * v)).tanh())
            }
            "SIGMOID_APPROXIMATION" => |v: f32| v * sigmoid(1.702 * v),
            _ => gelu,
        };
        each_of(c, f)
    })
};

pub(super) static ELU: Spec = scaled("elu", ALPHA, |c| {
    let alpha = c.float_or("alpha", 1.0)?;
    each_of(c, |v| if v < 0.0 { alpha * v.exp_m1() } else { v })
});

pub(super) static LEAKY_RELU: Spec = scaled("leaky_relu", ALPHA, |c| {
    let alpha = c.float_or("alpha", 0.01)?;
    each_of(c, |v| if v < 0.0 { alpha * v } else { v })
});

pub(super) static THRESHOLDED_RELU: Spec = scaled("thresholded_relu", ALPHA, |c| {
    let alpha = c.float_or("alpha", 1.0)?;
    each_of(c, |v| if v < alpha { 0.0 } else { v })
});

pub(super) static CLAMPED_RELU: Spec = scaled("clamped_relu", ALPHA_BETA, |c| {
    let (alpha, beta) = (c.float_or("alpha", 1.0)?, c.float_or("beta", 1.0)?);
    each_of(c, |v| (if v < 0.0 { alpha * v } else { v }).min(beta))
});

pub(super) static LINEAR_ACTIVATION: Spec = scaled("linear_activation", ALPHA_BETA, |c| {
    let (alpha, beta) = (c.float_or("alpha", 1.0)?, c.float_or("beta", 0.0)?);
    each_of(c, |v| alpha * v + beta)
});

pub(super) static SIGMOID_HARD: Spec = scaled("sigmoid_hard", ALPHA_BETA, |c| {
    let (alpha, beta) = (c.float_or("alpha", 0.2)?, c.float_or("beta", 0.5)?);
    each_of(c, |v| (alpha * v + beta).clamp(0.0, 1.0))
});

pub(super) static SCALED_TANH: Spec = scaled("scaled_tanh", ALPHA_BETA, |c| {
    let (alpha, beta) = (c.float_or("alpha", 1.0)?, c.float_or("beta", 1.0)?);
    each_of(c, |v| alpha * (beta * v).tanh())
});

pub(super) static PRELU: Spec = Spec {
    infer: |a| {
        per_channel(a, &["alpha"])?;
        a.like("x")
    },
    ..scaled("prelu", ALPHA, |c| {
        let x = c.tensor("x")?;
        let alpha = channels(c.tensor("alpha")?, x.rank())?;
        one(x.ge(0f64)?.where_cond(x, &x.broadcast_mul(&alpha)?)?)
    })
};

/// `alpha · ln(1 + exp(beta · x))`, one alpha and one beta a channel.
pub(super) static SOFTPLUS_PARAMETRIC: Spec = Spec {
    infer: |a| {
        per_channel(a, &["alpha", "beta"])?;
        a.like("x")
    },
    ..scaled("softplus_parametric", ALPHA_BETA, |c| {
        let x = c.tensor("x")?;
        let beta = channels(c.tensor("beta")?, x.rank())?;
        let inner = each(&x.broadcast_mul(&beta)?, softplus)?;
        one(inner.broadcast_mul(&channels(c.tensor("alpha")?, x.rank())?)?)
    })
};

const ALPHA: &[Param] = &[need("x", FLOAT), fixed("alpha", FLOAT)];
const ALPHA_BETA: &[Param] = &[need("x", FLOAT), fixed("alpha", FLOAT), fixed("beta", FLOAT)];
const SQRT_2_PI: f32 = 0.797_884_6;

/// Refuses parameters that are not vectors of one entry a channel of `x`.
fn per_channel(a: &crate::ops::Args<'_>, names: &[&str]) -> Result<()> {
    let x = a.tensor("x")?;
    if x.rank() < 3 {
        bail!("{} has rank {}, 3 to 5 is expected", named("x", x), x.rank());
    }
    for name in names {
        let t = a.tensor(name)?;
        if t.rank() != 1 || !t.dims[0].agrees(x.dims[1]) {
            bail!("{} has {} channels, {} does not fit", named("x", x), x.dims[1], named(name, t));
        }
    }
    Ok(())
}

fn sigmoid(v: f32) -> f32 {
    1.0 / (1.0 + (-v).exp())
}

fn softplus(v: f32) -> f32 {
    v.max(0.0) + (-v.abs()).exp().ln_1p()
}

#[expect(clippy::cast_possible_truncation, reason = "computed wider, so that small results stay exact")]
fn gelu(v: f32) -> f32 {
    let wide = f64::from(v);
    (0.5 * wide * (1.0 + erf_f64(wide * std::f64::consts::FRAC_1_SQRT_2))) as f32
}
