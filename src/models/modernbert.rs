//! ModernBERT: rotary positions, norms before the blocks, gated feed-forward, and local attention in most
//! layers.

use super::encoder::{Encoder, Inputs};
use crate::{
    bail,
    checkpoint::Config,
    error::Result,
    nn::{Act, Hidden, Mask, Net, linear::Rows, rope::Rotation},
};

pub(super) static MODERNBERT: Encoder = Encoder {
    base: "model",
    segments: false,
    longest,
    body,
    pools_to_classify: true,
    per_token: Some(prediction_head),
    classify: Some(classify),
    masked_lm: Some(masked_lm),
    discriminate: None,
};

fn longest(config: &Config) -> Result<usize> {
    config.usize(&["max_position_embeddings"])
}

/// What a kind of layer, global or local, has of its own.
struct Reach {
    rotation: Rotation,
    mask: Mask,
}

fn body(n: &mut Net<'_>, inputs: &Inputs) -> Result<Hidden> {
    let config = &n.checkpoint.config;
    let eps = eps(n)?;
    let (hidden, heads) = (config.usize(&["hidden_size"])?, config.usize(&["num_attention_heads"])?);
    if heads == 0 || hidden % (2 * heads) != 0 {
        bail!("config.json: {hidden} channels do not split into {heads} heads of an even size");
    }
    let dim = hidden / heads;
    let global_theta = config.f64_or(&["global_rope_theta"], 160_000.0)?;
    let local_theta = config.f64_or(&["local_rope_theta"], 10_000.0)?;
    let every = config.usize_or(&["global_attn_every_n_layers"], 3)?.max(1);
    let layers = config.usize(&["num_hidden_layers"])?;
    let window = config.usize_or(&["local_attention"], 128)?;

    let mut x = n.within("embeddings", |n| {
        let words = n.lookup("tok_embeddings", inputs.input_ids)?;
        let x = n.to_hidden("embeddings", words)?;
        n.layer_norm("norm", eps, x)
    })?;
    let global = Reach { rotation: n.rotation(global_theta, heads, dim), mask: inputs.masks() };
    let local = Reach {
        rotation: n.rotation(local_theta, heads, dim),
        mask: Mask(vec![n.window_mask(inputs.mask, window / 2)?]),
    };
    for i in 0..layers {
        let reach = if i % every == 0 { &global } else { &local };
        x = n.within(&format!("layers.{i}"), |n| layer(n, x, heads, dim, reach))?;
    }
    n.layer_norm("final_norm", eps, x)
}

fn layer(n: &mut Net<'_>, x: Hidden, heads: usize, dim: usize, reach: &Reach) -> Result<Hidden> {
    let eps = eps(n)?;
    // The first layer has no norm here: the embeddings are normalised already.
    let h = if n.has("attn_norm.weight") { n.layer_norm("attn_norm", eps, x)? } else { x };
    let a = attention(n, h, heads, dim, reach)?;
    let x = n.add(x, a)?;
    let h = n.layer_norm("mlp_norm", eps, x)?;
    let h = gated(n, h)?;
    n.add(x, h)
}

fn attention(n: &mut Net<'_>, x: Hidden, heads: usize, dim: usize, reach: &Reach) -> Result<Hidden> {
    let hidden = heads * dim;
    let q = n.linear_with("attn.Wqkv", "q", Rows::in_halves(0, heads, dim, Net::score_scale(dim)), x)?;
    let k = n.linear_with("attn.Wqkv", "k", Rows::in_halves(hidden, heads, dim, 1.0), x)?;
    let v = n.linear_rows("attn.Wqkv", "v", 2 * hidden..3 * hidden, x)?;
    let q = n.rotate("attn.q", q, &reach.rotation)?;
    let k = n.rotate("attn.k", k, &reach.rotation)?;
    let q = n.rotated_heads("attn.q", q, heads)?;
    let k = n.rotated_keys("attn.k", k, heads)?;
    let v = n.heads("attn.v", v, heads)?;
    let a = n.attend("attn", &q, &k, &v, Some(&reach.mask))?;
    n.linear("attn.Wo", a)
}

/// `Wo(act(input) · gate)`, both halves of `Wi`.
fn gated(n: &mut Net<'_>, x: Hidden) -> Result<Hidden> {
    let act = Act::parse(n.checkpoint.config.str_or(&["hidden_activation"], "gelu")?)?;
    let width = n.linear_out("mlp.Wi")? / 2;
    let input = n.linear_rows("mlp.Wi", "input", 0..width, x)?;
    let gate = n.linear_rows("mlp.Wi", "gate", width..2 * width, x)?;
    let input = n.act(act, input)?;
    let h = Hidden(n.binary("mul", "mlp.gated", input, gate)?);
    n.linear("mlp.Wo", h)
}

fn eps(n: &Net<'_>) -> Result<f64> {
    n.checkpoint.config.f64_or(&["norm_eps"], 1e-5)
}

/// Dense, activation, norm: what every head of this family begins with.
fn prediction_head(n: &mut Net<'_>, _: &Inputs, x: Hidden) -> Result<Hidden> {
    let act = Act::parse(n.checkpoint.config.str_or(&["classifier_activation"], "gelu")?)?;
    let x = n.linear("head.dense", x)?;
    let x = n.act(act, x)?;
    n.layer_norm("head.norm", eps(n)?, x)
}

fn classify(n: &mut Net<'_>, inputs: &Inputs, x: Hidden) -> Result<Hidden> {
    let x = match (n.checkpoint.config.str_or(&["classifier_pooling"], "cls")?, inputs.token_weights) {
        ("mean", Some(weights)) => n.mean_of_tokens("pooling", x, weights)?,
        ("cls", _) => n.first_token("pooling", x)?,
        (other, _) => {
            bail!("config.json: classifier_pooling `{other}` is not supported"; hint: "`cls` and `mean` are")
        }
    };
    let x = prediction_head(n, inputs, x)?;
    n.linear("classifier", x)
}

fn masked_lm(n: &mut Net<'_>, inputs: &Inputs, x: Hidden) -> Result<Hidden> {
    let x = prediction_head(n, inputs, x)?;
    let words = inputs.in_base("embeddings.tok_embeddings.weight");
    n.tied_vocabulary("decoder", "decoder.bias", &words, x)
}
