//! What all encoders share: the families, positions, masks, activations and attention.

use candle_core::{D, Device, Tensor};

use super::{Inputs, scope::Scope};
use crate::{
    bail,
    checkpoint::{Checkpoint, Config},
    error::Result,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    Bert,
    /// Also XLM-RoBERTa and CamemBERT: BERT with positions after the padding id.
    Roberta,
    Electra,
    DistilBert,
    Mpnet,
    Albert,
    ModernBert,
}

const MODEL_TYPES: [(&str, Family, &str); 9] = [
    ("albert", Family::Albert, "albert"),
    ("bert", Family::Bert, "bert"),
    ("camembert", Family::Roberta, "roberta"),
    ("distilbert", Family::DistilBert, "distilbert"),
    ("electra", Family::Electra, "electra"),
    ("modernbert", Family::ModernBert, "model"),
    ("mpnet", Family::Mpnet, "mpnet"),
    ("roberta", Family::Roberta, "roberta"),
    ("xlm-roberta", Family::Roberta, "roberta"),
];

impl Family {
    pub(super) fn of(config: &Config) -> Result<Family> {
        let seen = config.model_type()?;
        match MODEL_TYPES.iter().find(|(name, ..)| *name == seen) {
            Some((_, family, _)) => Ok(*family),
            None => {
                let names = MODEL_TYPES.map(|(name, ..)| format!("`{name}`")).join(", ");
                bail!("model_type `{seen}` has no reference"; hint: "supported are {names}")
            }
        }
    }
}

/// A checkpoint and the batch it is run on.
pub(super) struct Model<'a> {
    pub(super) family: Family,
    pub(super) checkpoint: &'a Checkpoint,
    pub(super) config: &'a Config,
    pub(super) inputs: &'a Inputs,
    /// Where the heads are.
    pub(super) root: Scope<'a>,
    /// Where the bare model is: the root, or below the name that classes with a head give it.
    pub(super) base: Scope<'a>,
    pub(super) sequence: usize,
}

impl<'a> Model<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, family: Family, inputs: &'a Inputs) -> Result<Self> {
        let (config, sequence) = (&checkpoint.config, check(inputs)?);
        for key in ["position_embedding_type", "is_decoder"] {
            let fine = config.get(&[key]).is_none_or(|v| *v == "absolute" || *v == false);
            if !fine {
                return Err(config.wrong(key, "what an encoder with absolute positions has"));
            }
        }
        let root = Scope::root(&checkpoint.tensors);
        let prefix = MODEL_TYPES.iter().find(|(_, f, _)| *f == family).map_or("", |(_, _, p)| p);
        let below = checkpoint.tensors.names().any(|n| n.starts_with(&format!("{prefix}.embeddings.")));
        let base = if below { root.join(prefix) } else { root.clone() };
        Ok(Model { family, checkpoint, config, inputs, root, base, sequence })
    }

    pub(super) fn layer_count(&self) -> Result<usize> {
        self.small_count(&["num_hidden_layers", "n_layers"], None)
    }

    /// A count of layers or groups, within what any real model has.
    pub(super) fn small_count(&self, keys: &[&str], default: Option<usize>) -> Result<usize> {
        match self.config.opt_usize(keys)?.or(default) {
            None => self.config.usize(keys),
            Some(n) if (1..=1024).contains(&n) => Ok(n),
            Some(n) => bail!("{}: `{}` is {n}, expected 1 to 1024", self.config.path().display(), keys[0]),
        }
    }

    pub(super) fn layer_norm_eps(&self) -> Result<f64> {
        match self.family {
            Family::DistilBert => Ok(1e-12),
            Family::ModernBert => self.config.f64_or(&["norm_eps"], 1e-5),
            _ => self.config.f64_or(&["layer_norm_eps"], 1e-12),
        }
    }

    /// The activation that the config names.
    pub(super) fn act(&self) -> Result<&'a str> {
        let default = if self.family == Family::Albert { "gelu_new" } else { "gelu" };
        let named = self.config.opt_str(&["hidden_act", "hidden_activation", "activation"])?;
        Ok(named.unwrap_or(default))
    }

    pub(super) fn heads(&self) -> Result<usize> {
        let keys = ["num_attention_heads", "n_heads"];
        let (heads, hidden) = (self.config.usize(&keys)?, self.config.usize(&["hidden_size", "dim"])?);
        if heads == 0 || hidden % heads != 0 {
            bail!("{}: {hidden} channels cannot be split into {heads} heads", self.config.path().display());
        }
        Ok(heads)
    }

    /// Positions as Transformers counts them: from 0, or from the padding id + 1 over what is not padding.
    pub(super) fn position_ids(&self) -> Result<Vec<Vec<u32>>> {
        let pad = match self.family {
            Family::Roberta => self.config.usize_or(&["pad_token_id"], 1)?,
            Family::Mpnet => 1,
            _ => return Ok(vec![(0u32..).take(self.sequence).collect(); self.inputs.input_ids.len()]),
        };
        let Ok(pad) = u32::try_from(pad) else { return Err(self.config.wrong("pad_token_id", "a token id")) };
        let count = |row: &Vec<u32>| {
            let mut last = pad;
            let mut next = |id: &u32| {
                if *id == pad {
                    return pad;
                }
                last = last.saturating_add(1);
                last
            };
            row.iter().map(&mut next).collect()
        };
        Ok(self.inputs.input_ids.iter().map(count).collect())
    }

    /// What is added to the scores, `[batch, 1, query, key]`: the lowest number where the key is padding,
    /// or further than `window` from the query. It is finite, so a row without any key is not NaN.
    pub(super) fn mask(&self, window: Option<usize>) -> Result<Tensor> {
        let (rows, s) = (&self.inputs.attention_mask, self.sequence);
        let mut mask = Vec::with_capacity(rows.len() * s * s);
        for row in rows {
            for query in 0..s {
                for (key, real) in row.iter().enumerate() {
                    let near = window.is_none_or(|w| query.abs_diff(key) <= w);
                    mask.push(if near && *real != 0 { 0.0 } else { f32::MIN });
                }
            }
        }
        Ok(Tensor::from_vec(mask, (rows.len(), 1, s, s), &Device::Cpu)?)
    }

    /// The first token of every text, `[batch, channels]`.
    pub(super) fn first_token(&self, hidden: &Tensor) -> Result<Tensor> {
        Ok(hidden.narrow(1, 0, 1)?.squeeze(1)?)
    }
}

/// The functions of Transformers' `ACT2FN` that checkpoints name.
pub(super) fn activation(name: &str, x: &Tensor) -> Result<Tensor> {
    Ok(match name {
        "gelu" | "gelu_python" => x.gelu_erf()?,
        "gelu_new" | "gelu_fast" | "gelu_accurate" | "gelu_pytorch_tanh" => x.gelu()?,
        "quick_gelu" => (x * candle_nn::ops::sigmoid(&(x * 1.702)?)?)?,
        "relu" => x.relu()?,
        "relu2" => x.relu()?.sqr()?,
        "relu6" => x.clamp(0f32, 6f32)?,
        "leaky_relu" => candle_nn::ops::leaky_relu(x, 0.01)?,
        "silu" | "swish" => x.silu()?,
        "tanh" => x.tanh()?,
        "sigmoid" => candle_nn::ops::sigmoid(x)?,
        "linear" => x.clone(),
        other => bail!(
            "activation `{other}` is not supported";
            hint: "supported are gelu, gelu_new, gelu_pytorch_tanh, quick_gelu, relu, relu2, relu6, leaky_relu, silu, tanh, sigmoid, linear"
        ),
    })
}

/// `[batch, sequence, channels]` → `[batch, heads, sequence, channels / heads]`
pub(super) fn split_heads(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (batch, sequence, channels) = x.dims3()?;
    Ok(x.reshape((batch, sequence, heads, channels / heads))?.transpose(1, 2)?.contiguous()?)
}

/// Attention of split heads with an additive bias; the heads come back joined.
pub(super) fn attention(q: &Tensor, k: &Tensor, v: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let (batch, heads, sequence, width) = q.dims4()?;
    #[expect(clippy::cast_precision_loss, reason = "a head's width is small")]
    let scale = 1.0 / (width as f64).sqrt();
    let scores = (q.matmul(&k.t()?)? * scale)?.broadcast_add(bias)?;
    let mixed = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(v)?;
    Ok(mixed.transpose(1, 2)?.reshape((batch, sequence, heads * width))?)
}

/// The length of the rows.
pub(super) fn check(inputs: &Inputs) -> Result<usize> {
    let ids = &inputs.input_ids;
    let sequence = ids.first().map_or(0, Vec::len);
    if sequence == 0 {
        bail!("input_ids: there are no tokens");
    }
    let named = [
        ("input_ids", Some(ids)),
        ("attention_mask", Some(&inputs.attention_mask)),
        ("token_type_ids", inputs.token_type_ids.as_ref()),
    ];
    for (name, rows) in named.into_iter().filter_map(|(name, rows)| Some((name, rows?))) {
        if rows.len() != ids.len() {
            bail!("{name}: {} rows, expected {}", rows.len(), ids.len());
        }
        if let Some(row) = rows.iter().find(|row| row.len() != sequence) {
            bail!("{name}: a row of {} tokens, expected {sequence}", row.len());
        }
    }
    Ok(sequence)
}
