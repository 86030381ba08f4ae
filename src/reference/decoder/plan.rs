//! The numbers of a decoder, read from its config and held to sane sizes.

use std::iter::repeat_n;

use serde_json::Value;

use super::{
    family::{Family, Mlp, Rotary, Windows},
    rope::Rope,
};
use crate::{
    bail,
    checkpoint::Config,
    error::{Context, Result},
};

#[derive(Clone)]
pub(super) struct Plan {
    pub(super) family: Family,
    pub(super) hidden: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    /// Channels of a head.
    pub(super) width: usize,
    pub(super) epsilon: f64,
    pub(super) act: String,
    pub(super) layers: Vec<LayerPlan>,
    /// The rotary positions that layers refer to by their number.
    pub(super) ropes: Vec<Rope>,
    pub(super) alibi: Option<Alibi>,
    pub(super) qk_norm: bool,
    pub(super) experts: Option<Experts>,
    pub(super) words_scale: f64,
    pub(super) residual_scale: f64,
    pub(super) logits_scale: f64,
    pub(super) score_cap: Option<f64>,
    pub(super) logit_cap: Option<f64>,
    pub(super) tied: bool,
}

#[derive(Clone)]
pub(super) struct LayerPlan {
    /// How many keys a query sees, itself included.
    pub(super) window: Option<usize>,
    pub(super) rope: Option<usize>,
    pub(super) score_scale: f64,
    pub(super) sparse: bool,
}

/// Scores fall with the distance; how they are rounded and scaled differs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Alibi {
    Bloom,
    /// In bf16, and scaled with the scores.
    Falcon,
}

#[derive(Clone, Copy)]
pub(super) struct Experts {
    pub(super) count: usize,
    pub(super) per_token: usize,
    pub(super) normalize: bool,
}

/// More than any real model has; keeps a damaged config from being believed.
const MOST_LAYERS: usize = 1024;
const MOST_CHANNELS: usize = 1 << 20;

impl Plan {
    pub(super) fn read(config: &Config) -> Result<Plan> {
        let family = Family::of(config)?;
        refuse_variants(config)?;
        let hidden = size(config, &["hidden_size", "n_embd"], MOST_CHANNELS)?;
        let heads = size(config, &["num_attention_heads", "n_head", "num_heads"], MOST_CHANNELS)?;
        let width = match config.opt_usize(&["head_dim"])?.or(family.head_dim) {
            Some(width) => held(config, "head_dim", width, MOST_CHANNELS)?,
            None if hidden % heads == 0 => hidden / heads,
            None => {
                bail!("{}: {hidden} channels cannot be split into {heads} heads", config.path().display())
            }
        };
        let count = size(config, &["num_hidden_layers", "n_layer", "num_layers"], MOST_LAYERS)?;
        let (layers, ropes) = layers(config, &family, count, width)?;
        let one = |key: &str| config.f64_or(&[key], 1.0);
        let named = family.model_type;
        #[expect(clippy::cast_precision_loss, reason = "a number of channels is small")]
        let root = (hidden as f64).sqrt();
        let gemma2 = named == "gemma2";
        Ok(Plan {
            hidden,
            heads,
            kv_heads: kv_heads(config, named, heads)?,
            width,
            epsilon: config.f64_or(&[family.epsilon.0], family.epsilon.1)?,
            act: config.str_or(&[family.act.0], family.act.1)?.to_string(),
            layers,
            ropes,
            alibi: alibi(config, named)?,
            qk_norm: match family.qk_norm {
                Some(norm) => norm.key.map_or(Ok(true), |key| config.bool_or(&[key], false))?,
                None => false,
            },
            experts: experts(config, &family)?,
            words_scale: match named {
                "gemma" | "gemma2" | "gemma3_text" => root,
                "granite" => one("embedding_multiplier")?,
                _ => 1.0,
            },
            residual_scale: if named == "granite" { one("residual_multiplier")? } else { 1.0 },
            logits_scale: match named {
                "granite" => 1.0 / one("logits_scaling")?,
                "cohere" => config.f64_or(&["logit_scale"], 0.0625)?,
                _ => 1.0,
            },
            score_cap: soft_cap(config, "attn_logit_softcapping", gemma2.then_some(50.0))?,
            logit_cap: soft_cap(config, "final_logit_softcapping", gemma2.then_some(30.0))?,
            tied: config.tied_embeddings()?.unwrap_or(family.tied),
            family,
        })
    }
}

fn size(config: &Config, keys: &[&str], most: usize) -> Result<usize> {
    held(config, &keys.join("` or `"), config.usize(keys)?, most)
}

fn held(config: &Config, key: &str, n: usize, most: usize) -> Result<usize> {
    if (1..=most).contains(&n) {
        return Ok(n);
    }
    bail!("{}: `{key}` is {n}, expected 1 to {most}", config.path().display())
}

/// What a config can switch on and no checkpoint of note does.
fn refuse_variants(config: &Config) -> Result<()> {
    for key in
        ["apply_residual_connection_post_layernorm", "use_bidirectional_attention", "add_cross_attention"]
    {
        if config.bool_or(&[key], false)? {
            return Err(config.wrong(key, "false"));
        }
    }
    Ok(())
}

fn kv_heads(config: &Config, named: &str, heads: usize) -> Result<usize> {
    let key = match named {
        "falcon" if config.bool_or(&["new_decoder_architecture"], false)? => "num_kv_heads",
        "falcon" if config.bool_or(&["multi_query"], true)? => return Ok(1),
        "falcon" | "bloom" | "gpt2" | "gpt_neo" | "gpt_neox" | "opt" => return Ok(heads),
        _ => "num_key_value_heads",
    };
    let n = config.usize_or(&[key], heads)?;
    if n == 0 || !heads.is_multiple_of(n) {
        bail!("{}: {heads} heads cannot share `{key}` {n}", config.path().display());
    }
    Ok(n)
}

fn alibi(config: &Config, named: &str) -> Result<Option<Alibi>> {
    Ok(match named {
        "bloom" => Some(Alibi::Bloom),
        "falcon" if config.bool_or(&["alibi"], false)? => Some(Alibi::Falcon),
        _ => None,
    })
}

fn experts(config: &Config, family: &Family) -> Result<Option<Experts>> {
    if !matches!(family.mlp, Mlp::Experts { .. }) {
        return Ok(None);
    }
    let count = size(config, &["num_local_experts", "num_experts"], MOST_LAYERS)?;
    let per_token = size(config, &["num_experts_per_tok"], count)?;
    let normalize = family.model_type == "mixtral" || config.bool_or(&["norm_topk_prob"], false)?;
    Ok(Some(Experts { count, per_token, normalize }))
}

/// `default` holds where the key is absent; a null is no cap.
fn soft_cap(config: &Config, key: &str, default: Option<f64>) -> Result<Option<f64>> {
    if config.raw().contains_key(key) { config.opt_f64(&[key]) } else { Ok(default) }
}

fn layers(
    config: &Config,
    family: &Family,
    count: usize,
    width: usize,
) -> Result<(Vec<LayerPlan>, Vec<Rope>)> {
    let windows = windows(config, family, count)?;
    let ropes = ropes(config, family, width)?;
    let rotated = rotated(config, family, count)?;
    let mut layers = Vec::with_capacity(count);
    for (i, (window, rotated)) in windows.into_iter().zip(rotated).enumerate() {
        let local = ropes.len() > 1 && window.is_some();
        layers.push(LayerPlan {
            window,
            rope: (rotated && !ropes.is_empty()).then_some(usize::from(local)),
            score_scale: score_scale(config, family.model_type, width, i)?,
            sparse: sparse(config, family, i)?,
        });
    }
    Ok((layers, ropes))
}

/// One, or for Gemma 3 those of full layers and those of layers with a window.
fn ropes(config: &Config, family: &Family, width: usize) -> Result<Vec<Rope>> {
    let Rotary::On { theta, part, pairs } = family.rotary else { return Ok(Vec::new()) };
    let global = Rope::read(config, theta, part, width, pairs)?;
    if family.model_type == "gemma3_text" {
        return Ok(vec![global, Rope::read_local(config, width)?]);
    }
    Ok(vec![global])
}

fn rotated(config: &Config, family: &Family, count: usize) -> Result<Vec<bool>> {
    if family.model_type != "smollm3" {
        return Ok(vec![true; count]);
    }
    match config.opt_usizes("no_rope_layers")? {
        Some(on) if on.len() >= count => Ok(on.into_iter().take(count).map(|n| n != 0).collect()),
        Some(on) => {
            bail!("{}: `no_rope_layers` has {} layers, expected {count}", config.path().display(), on.len())
        }
        None => {
            let key = "no_rope_layer_interval";
            let every = held(config, key, config.usize_or(&[key], 4)?, MOST_CHANNELS)?;
            Ok((1..=count).map(|i| i % every != 0).collect())
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "widths and layers are small")]
fn score_scale(config: &Config, named: &str, width: usize, layer: usize) -> Result<f64> {
    let usual = (width as f64).powf(-0.5);
    Ok(match named {
        "gemma2" | "gemma3_text" => config.f64_or(&["query_pre_attn_scalar"], 256.0)?.powf(-0.5),
        "granite" => config.f64_or(&["attention_multiplier"], 1.0)?,
        "gpt_neo" => 1.0,
        "gpt2" => {
            let scale = if config.bool_or(&["scale_attn_weights"], true)? { usual } else { 1.0 };
            let inverse = config.bool_or(&["scale_attn_by_inverse_layer_idx"], false)?;
            if inverse { scale / (layer + 1) as f64 } else { scale }
        }
        _ => usual,
    })
}

fn sparse(config: &Config, family: &Family, layer: usize) -> Result<bool> {
    if family.model_type != "qwen3_moe" {
        return Ok(matches!(family.mlp, Mlp::Experts { .. }));
    }
    let step = config.usize_or(&["decoder_sparse_step"], 1)?;
    let dense = config.opt_usizes("mlp_only_layers")?.unwrap_or_default();
    Ok(!dense.contains(&layer) && step > 0 && (layer + 1).is_multiple_of(step))
}

fn windows(config: &Config, family: &Family, count: usize) -> Result<Vec<Option<usize>>> {
    let given = config.raw().contains_key("sliding_window");
    let window = |default: Option<usize>| {
        if given { config.opt_usize(&["sliding_window"]) } else { Ok(default) }
    };
    let switched = || config.bool_or(&["use_sliding_window"], false);
    let window = match family.windows {
        Windows::Never => return Ok(vec![None; count]),
        Windows::Always(default) => return Ok(vec![window(default)?; count]),
        Windows::Switched => {
            return Ok(vec![if switched()? { window(Some(4096))? } else { None }; count]);
        }
        Windows::Listed => return listed(config, count),
        Windows::Upper | Windows::Rotationless if !switched()? => None,
        Windows::Rotationless => window(None)?,
        Windows::Upper | Windows::Pattern(_) => window(Some(4096))?,
    };
    let sliding = match layer_types(config, count)? {
        Some(types) => types,
        None => match family.windows {
            Windows::Pattern(default) => {
                let every =
                    config.usize_or(&["sliding_window_pattern", "_sliding_window_pattern"], default)?;
                (1..=count).map(|i| every == 0 || i % every != 0).collect()
            }
            Windows::Rotationless => rotated(config, family, count)?.into_iter().map(|on| !on).collect(),
            _ => {
                let first = config.usize_or(&["max_window_layers"], 28)?;
                (0..count).map(|i| i >= first).collect()
            }
        },
    };
    Ok(sliding.into_iter().map(|sliding| window.filter(|_| sliding)).collect())
}

/// Which layers have a window, by `layer_types`.
fn layer_types(config: &Config, count: usize) -> Result<Option<Vec<bool>>> {
    if config.get(&["layer_types"]).is_none() {
        return Ok(None);
    }
    let types = config.strings("layer_types");
    let known = |t: &&str| ["sliding_attention", "full_attention"].contains(t);
    if types.len() != count || !types.iter().all(known) {
        return Err(config.wrong(
            "layer_types",
            &format!("`full_attention` or `sliding_attention` for each of {count} layers"),
        ));
    }
    Ok(Some(types.into_iter().map(|t| t == "sliding_attention").collect()))
}

/// `[[["global", "local"], 12]]`: kinds, and how often they are repeated.
fn listed(config: &Config, count: usize) -> Result<Vec<Option<usize>>> {
    let wrong =
        || config.wrong("attention_types", &format!("`global` or `local` for each of {count} layers"));
    let window = config.usize_or(&["window_size"], 256)?;
    let mut kinds = Vec::new();
    for group in config.get(&["attention_types"]).and_then(Value::as_array).ok_or_else(wrong)? {
        let names: Option<Vec<&str>> =
            group.get(0).and_then(Value::as_array).and_then(|n| n.iter().map(Value::as_str).collect());
        let times = group.get(1).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
        let (Some(names), Some(times)) = (names, times) else { return Err(wrong()) };
        let room = (count + 1).saturating_sub(kinds.len());
        kinds.extend(repeat_n(names, times.min(room)).flatten().take(room));
    }
    let window_of = |kind: &str| match kind {
        "global" => Ok(None),
        "local" => Ok(Some(window)),
        _ => Err(wrong()),
    };
    if kinds.len() != count {
        return Err(wrong());
    }
    kinds.into_iter().map(window_of).collect::<Result<_>>().within(|| "while reading the windows".into())
}
