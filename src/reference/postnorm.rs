//! The encoders that normalize after each residual: BERT and its kin, DistilBERT, MPNet, ALBERT.

use candle_core::Tensor;

use super::{
    model::{Family, Model, activation, attention, split_heads},
    scope::Scope,
};
use crate::{
    bail,
    error::{Context, Result},
};

/// The names of a layer's parts.
struct Names {
    qkv: [&'static str; 3],
    out: &'static str,
    attention_norm: &'static str,
    up: &'static str,
    down: &'static str,
    norm: &'static str,
}

const BERT: Names = Names {
    qkv: ["attention.self.query", "attention.self.key", "attention.self.value"],
    out: "attention.output.dense",
    attention_norm: "attention.output.LayerNorm",
    up: "intermediate.dense",
    down: "output.dense",
    norm: "output.LayerNorm",
};

const DISTILBERT: Names = Names {
    qkv: ["attention.q_lin", "attention.k_lin", "attention.v_lin"],
    out: "attention.out_lin",
    attention_norm: "sa_layer_norm",
    up: "ffn.lin1",
    down: "ffn.lin2",
    norm: "output_layer_norm",
};

const MPNET: Names = Names {
    qkv: ["attention.attn.q", "attention.attn.k", "attention.attn.v"],
    out: "attention.attn.o",
    attention_norm: "attention.LayerNorm",
    up: "intermediate.dense",
    down: "output.dense",
    norm: "output.LayerNorm",
};

const ALBERT: Names = Names {
    qkv: ["attention.query", "attention.key", "attention.value"],
    out: "attention.dense",
    attention_norm: "attention.LayerNorm",
    up: "ffn",
    down: "ffn_output",
    norm: "full_layer_layer_norm",
};

/// The last hidden states.
pub(super) fn hidden(model: &Model<'_>) -> Result<Tensor> {
    let names = match model.family {
        Family::DistilBert => &DISTILBERT,
        Family::Mpnet => &MPNET,
        Family::Albert => &ALBERT,
        _ => &BERT,
    };
    let mut bias = model.mask(None)?;
    if model.family == Family::Mpnet {
        bias = bias.broadcast_add(&relative_bias(model)?)?;
    }
    let block =
        Block { names, heads: model.heads()?, epsilon: model.layer_norm_eps()?, act: model.act()?, bias };
    let mut x = embeddings(model)?;
    for layer in layers(model)? {
        x = block.run(&layer, &x)?;
    }
    Ok(x)
}

struct Block<'a> {
    names: &'a Names,
    heads: usize,
    epsilon: f64,
    act: &'a str,
    bias: Tensor,
}

impl Block<'_> {
    fn run(&self, layer: &Scope<'_>, x: &Tensor) -> Result<Tensor> {
        let n = self.names;
        let [q, k, v] = n.qkv.map(|name| split_heads(&layer.linear(name, x)?, self.heads));
        let mixed = attention(&q?, &k?, &v?, &self.bias)?;
        let x = (x + layer.linear(n.out, &mixed)?)?;
        let x = layer.layer_norm(n.attention_norm, &x, self.epsilon)?;
        let wide = activation(self.act, &layer.linear(n.up, &x)?)?;
        let x = (&x + layer.linear(n.down, &wide)?)?;
        layer.layer_norm(n.norm, &x, self.epsilon)
    }
}

/// The layers in the order they run; ALBERT's run many times.
fn layers<'a>(model: &Model<'a>) -> Result<Vec<Scope<'a>>> {
    let (base, count) = (&model.base, model.layer_count()?);
    if model.family != Family::Albert {
        let stem = if model.family == Family::DistilBert { "transformer" } else { "encoder" };
        return Ok((0..count).map(|i| base.join(format!("{stem}.layer.{i}"))).collect());
    }
    let groups = model.small_count(&["num_hidden_groups"], Some(1))?;
    let inner = model.small_count(&["inner_group_num"], Some(1))?;
    let place = |i: usize, j: usize| {
        base.join(format!("encoder.albert_layer_groups.{}.albert_layers.{j}", i * groups / count))
    };
    Ok((0..count).flat_map(|i| (0..inner).map(move |j| (i, j))).map(|(i, j)| place(i, j)).collect())
}

fn embeddings(model: &Model<'_>) -> Result<Tensor> {
    let scope = model.base.join("embeddings");
    let words = scope.embedding("word_embeddings", &model.inputs.input_ids)?;
    let positions = scope
        .embedding("position_embeddings", &model.position_ids()?)
        .within(|| format!("while embedding {} positions", model.sequence))?;
    let mut x = (words + positions)?;
    if scope.has("token_type_embeddings.weight") {
        let zeros = vec![vec![0; model.sequence]; model.inputs.input_ids.len()];
        let types = model.inputs.token_type_ids.as_ref().unwrap_or(&zeros);
        x = (x + scope.embedding("token_type_embeddings", types)?)?;
    } else if model.inputs.token_type_ids.iter().flatten().flatten().any(|id| *id != 0) {
        bail!("token_type_ids: the model has no `token_type_embeddings`");
    }
    let x = scope.layer_norm("LayerNorm", &x, model.layer_norm_eps()?)?;
    match model.family {
        Family::Electra if model.base.has("embeddings_project.weight") => {
            model.base.linear("embeddings_project", &x)
        }
        Family::Albert => model.base.linear("encoder.embedding_hidden_mapping_in", &x),
        _ => Ok(x),
    }
}

/// MPNet's bias of every head by the distance of key and query, `[1, heads, query, key]`.
fn relative_bias(model: &Model<'_>) -> Result<Tensor> {
    let s = model.sequence;
    let buckets: Vec<Vec<u32>> = (0..s).map(|query| (0..s).map(|key| bucket(query, key)).collect()).collect();
    let bias = model.base.embedding("encoder.relative_attention_bias", &buckets)?;
    Ok(bias.permute((2, 0, 1))?.unsqueeze(0)?)
}

/// 16 buckets for keys up to the query and 16 for those after it: 8 exact, then 8 in logarithmic steps up
/// to a distance of 128. MPNet fixes these numbers whatever its config says.
fn bucket(query: usize, key: usize) -> u32 {
    let distance = query.abs_diff(key);
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a distance within a sequence; the logarithm is truncated in f32, as in Transformers"
    )]
    let step = match distance {
        0..8 => distance as u32,
        _ => 15.min(8 + ((distance as f32 / 8.0).ln() / 16f32.ln() * 8.0) as u32),
    };
    if key > query { 16 + step } else { step }
}

#[cfg(test)]
mod tests {
    use super::bucket;

    /// Numbers of Transformers' own formula, in numpy.
    #[test]
    fn distances_fall_into_mpnets_buckets() {
        for (distance, before) in [
            (0, 0),
            (1, 1),
            (7, 7),
            (8, 8),
            (11, 8),
            (12, 9),
            (16, 10),
            (31, 11),
            (32, 12),
            (45, 12),
            (46, 13),
            (63, 13),
            (64, 14),
            (90, 14),
            (91, 15),
            (511, 15),
        ] {
            let after = if distance == 0 { 0 } else { before + 16 };
            assert_eq!((bucket(distance, 0), bucket(0, distance)), (before, after), "{distance}");
        }
    }
}
