//! What the families of decoders call their parts, and how they put them together.
//!
//! Numbers are the config's; a default here is the one that Transformers has for a key that is absent.

use crate::{bail, checkpoint::Config, error::Result};

#[derive(Clone, Copy)]
pub(super) struct Family {
    pub(super) model_type: &'static str,
    /// Where the bare model may be.
    pub(super) bases: &'static [&'static str],
    pub(super) words: &'static str,
    pub(super) words_norm: Option<&'static str>,
    /// The table of learned positions, and its row for position 0.
    pub(super) positions: Option<(&'static str, u32)>,
    pub(super) rotary: Rotary,
    pub(super) layers: &'static str,
    pub(super) order: Order,
    pub(super) norms: Norms,
    pub(super) norm: NormKind,
    /// The key of the norms' epsilon, and its default.
    pub(super) epsilon: (&'static str, f64),
    pub(super) qkv: Qkv,
    pub(super) out: &'static str,
    pub(super) qk_norm: Option<QkNorm>,
    /// The width of a head, where it does not follow from the number of channels.
    pub(super) head_dim: Option<usize>,
    pub(super) windows: Windows,
    pub(super) mlp: Mlp,
    /// The key of the activation, and its default.
    pub(super) act: (&'static str, &'static str),
    /// Matrices are stored `[in, out]`.
    pub(super) transposed: bool,
    pub(super) final_norm: Option<&'static str>,
    pub(super) head: &'static str,
    /// Whether the head is the word embedding when the config does not say.
    pub(super) tied: bool,
}

#[derive(Clone, Copy)]
pub(super) enum Rotary {
    None,
    On {
        theta: f64,
        /// The share of a head that is rotated.
        part: f64,
        /// Neighbours are rotated together, not the two halves.
        pairs: bool,
    },
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// Attention is added, then the MLP of the sum.
    Serial,
    /// Attention and MLP of the same input are added.
    Parallel,
    /// As serial, with the norms on the sums.
    NormedSums,
}

/// Norms before and after each part of a layer.
#[derive(Clone, Copy)]
pub(super) struct Norms {
    pub(super) before_attention: Option<&'static str>,
    pub(super) after_attention: Option<&'static str>,
    pub(super) before_mlp: Option<&'static str>,
    pub(super) after_mlp: Option<&'static str>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum NormKind {
    Rms,
    /// RMS with a scale of 1 + weight.
    RmsPlusOne,
    Layer,
}

#[derive(Clone, Copy)]
pub(super) enum Qkv {
    Apart([&'static str; 3]),
    /// Queries, keys, values.
    Joined(&'static str),
    /// For each key head: its queries, the key, the value.
    Grouped(&'static str),
}

#[derive(Clone, Copy)]
pub(super) struct QkNorm {
    /// The key that switches the norms on, if they can be off.
    pub(super) key: Option<&'static str>,
    pub(super) names: [&'static str; 2],
    /// Over all heads at once.
    pub(super) whole: bool,
}

#[derive(Clone, Copy)]
pub(super) enum Windows {
    Never,
    /// `sliding_window` in every layer, with the default for an absent key.
    Always(Option<usize>),
    /// `sliding_window` in every layer when `use_sliding_window` says so.
    Switched,
    /// From layer `max_window_layers` on, when `use_sliding_window` says so.
    Upper,
    /// In all but every n-th layer.
    Pattern(usize),
    /// In layers without rotary positions, when `use_sliding_window` says so.
    Rotationless,
    /// GPT-Neo's `attention_types`.
    Listed,
}

#[derive(Clone, Copy)]
pub(super) enum Mlp {
    /// Gate, up, down.
    Gated([&'static str; 3]),
    /// Gate and up in one, down.
    Fused([&'static str; 2]),
    /// Up, down.
    Plain([&'static str; 2]),
    /// Gated experts in some layers.
    Experts { router: &'static str, experts: &'static str, gated: [&'static str; 3] },
}

impl Family {
    pub(super) fn of(config: &Config) -> Result<Family> {
        let names = || FAMILIES.map(|f| format!("`{}`", f.model_type)).join(", ");
        let seen = config.model_type().map_err(|e| e.hint(format!("supported are {}", names())))?;
        match FAMILIES.into_iter().find(|f| f.model_type == seen) {
            Some(family) => family.as_config_says(config),
            None => bail!("model_type `{seen}` has no reference"; hint: "supported are {}", names()),
        }
    }

    /// The variants of a family that differ in their order or names.
    fn as_config_says(mut self, config: &Config) -> Result<Family> {
        let on = |key: &str, default: bool| config.bool_or(&[key], default);
        let parallel = match self.model_type {
            "gpt_neox" => on("use_parallel_residual", true)?,
            "stablelm" => on("use_parallel_residual", false)?,
            "falcon" => on("parallel_attn", true)? || on("new_decoder_architecture", false)?,
            _ => self.order == Order::Parallel,
        };
        match self.model_type {
            "gpt_neox" if !parallel => self.order = Order::Serial,
            "stablelm" if parallel => {
                self.order = Order::Parallel;
                self.norms.before_mlp = None;
            }
            "falcon" => {
                if !parallel {
                    self.order = Order::Serial;
                    self.norms.before_mlp = Some("post_attention_layernorm");
                } else if on("new_decoder_architecture", false)?
                    && config.usize_or(&["num_ln_in_parallel_attn"], 2)? == 2
                {
                    self.norms.before_attention = Some("ln_attn");
                    self.norms.before_mlp = Some("ln_mlp");
                }
                if on("alibi", false)? {
                    self.rotary = Rotary::None;
                }
            }
            "opt" => {
                let before = on("do_layer_norm_before", true)?;
                if !before || on("_remove_final_layer_norm", false)? {
                    self.final_norm = None;
                }
                if !before {
                    let Norms { before_attention, before_mlp, .. } = self.norms;
                    self.order = Order::NormedSums;
                    self.norms = Norms {
                        before_attention: None,
                        after_attention: before_attention,
                        before_mlp: None,
                        after_mlp: before_mlp,
                    };
                }
            }
            _ => {}
        }
        Ok(self)
    }
}

const fn rotary(theta: f64, part: f64) -> Rotary {
    Rotary::On { theta, part, pairs: false }
}

const QK_NORM: QkNorm = QkNorm { key: None, names: ["self_attn.q_norm", "self_attn.k_norm"], whole: false };

const LLAMA: Family = Family {
    model_type: "llama",
    bases: &["model", ""],
    words: "embed_tokens",
    words_norm: None,
    positions: None,
    rotary: rotary(1e4, 1.0),
    layers: "layers",
    order: Order::Serial,
    norms: Norms {
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: None,
    },
    norm: NormKind::Rms,
    epsilon: ("rms_norm_eps", 1e-6),
    qkv: Qkv::Apart(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]),
    out: "self_attn.o_proj",
    qk_norm: None,
    head_dim: None,
    windows: Windows::Never,
    mlp: Mlp::Gated(["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]),
    act: ("hidden_act", "silu"),
    transposed: false,
    final_norm: Some("norm"),
    head: "lm_head",
    tied: false,
};

const GEMMA: Family = Family {
    model_type: "gemma",
    norm: NormKind::RmsPlusOne,
    head_dim: Some(256),
    act: ("hidden_activation", "gelu_pytorch_tanh"),
    tied: true,
    ..LLAMA
};

const GEMMA2: Family = Family {
    model_type: "gemma2",
    norms: Norms {
        before_attention: Some("input_layernorm"),
        after_attention: Some("post_attention_layernorm"),
        before_mlp: Some("pre_feedforward_layernorm"),
        after_mlp: Some("post_feedforward_layernorm"),
    },
    windows: Windows::Pattern(2),
    ..GEMMA
};

const GPT2: Family = Family {
    model_type: "gpt2",
    bases: &["transformer", ""],
    words: "wte",
    positions: Some(("wpe", 0)),
    rotary: Rotary::None,
    layers: "h",
    norms: Norms {
        before_attention: Some("ln_1"),
        after_attention: None,
        before_mlp: Some("ln_2"),
        after_mlp: None,
    },
    norm: NormKind::Layer,
    epsilon: ("layer_norm_epsilon", 1e-5),
    qkv: Qkv::Joined("attn.c_attn"),
    out: "attn.c_proj",
    mlp: Mlp::Plain(["mlp.c_fc", "mlp.c_proj"]),
    act: ("activation_function", "gelu_new"),
    transposed: true,
    final_norm: Some("ln_f"),
    tied: true,
    ..LLAMA
};

const GPT_NEOX: Family = Family {
    model_type: "gpt_neox",
    bases: &["gpt_neox", ""],
    words: "embed_in",
    rotary: rotary(1e4, 0.25),
    order: Order::Parallel,
    norm: NormKind::Layer,
    epsilon: ("layer_norm_eps", 1e-5),
    qkv: Qkv::Grouped("attention.query_key_value"),
    out: "attention.dense",
    mlp: Mlp::Plain(["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]),
    act: ("hidden_act", "gelu"),
    final_norm: Some("final_layer_norm"),
    head: "embed_out",
    ..LLAMA
};

const BLOOM: Family = Family {
    model_type: "bloom",
    bases: &["transformer", ""],
    words: "word_embeddings",
    words_norm: Some("word_embeddings_layernorm"),
    rotary: Rotary::None,
    layers: "h",
    order: Order::Serial,
    epsilon: ("layer_norm_epsilon", 1e-5),
    qkv: Qkv::Grouped("self_attention.query_key_value"),
    out: "self_attention.dense",
    act: ("", "gelu_pytorch_tanh"),
    final_norm: Some("ln_f"),
    head: "lm_head",
    tied: true,
    ..GPT_NEOX
};

pub(super) const FAMILIES: [Family; 23] = [
    BLOOM,
    Family {
        model_type: "cohere",
        rotary: Rotary::On { theta: 1e4, part: 1.0, pairs: true },
        order: Order::Parallel,
        norms: Norms { before_mlp: None, ..LLAMA.norms },
        norm: NormKind::Layer,
        epsilon: ("layer_norm_eps", 1e-5),
        qk_norm: Some(QkNorm { key: Some("use_qk_norm"), ..QK_NORM }),
        tied: true,
        ..LLAMA
    },
    Family {
        model_type: "falcon",
        words_norm: None,
        rotary: rotary(1e4, 1.0),
        order: Order::Parallel,
        norms: Norms { before_mlp: None, ..LLAMA.norms },
        act: ("activation", "gelu"),
        ..BLOOM
    },
    GEMMA,
    GEMMA2,
    Family {
        model_type: "gemma3_text",
        rotary: rotary(1e6, 1.0),
        qk_norm: Some(QK_NORM),
        windows: Windows::Pattern(6),
        ..GEMMA2
    },
    GPT2,
    Family {
        model_type: "gpt_neo",
        qkv: Qkv::Apart(["attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"]),
        out: "attn.attention.out_proj",
        windows: Windows::Listed,
        transposed: false,
        ..GPT2
    },
    GPT_NEOX,
    Family { model_type: "granite", ..LLAMA },
    LLAMA,
    Family { model_type: "mistral", windows: Windows::Always(Some(4096)), ..LLAMA },
    Family {
        model_type: "mixtral",
        rotary: rotary(1e6, 1.0),
        epsilon: ("rms_norm_eps", 1e-5),
        windows: Windows::Always(None),
        mlp: Mlp::Experts {
            router: "block_sparse_moe.gate",
            experts: "block_sparse_moe.experts",
            gated: ["w1", "w3", "w2"],
        },
        ..LLAMA
    },
    Family {
        model_type: "olmo2",
        norms: Norms {
            before_attention: None,
            after_attention: Some("post_attention_layernorm"),
            before_mlp: None,
            after_mlp: Some("post_feedforward_layernorm"),
        },
        epsilon: ("rms_norm_eps", 1e-5),
        qk_norm: Some(QkNorm { whole: true, ..QK_NORM }),
        ..LLAMA
    },
    Family {
        model_type: "opt",
        bases: &["model.decoder", "decoder", ""],
        positions: Some(("embed_positions", 2)),
        rotary: Rotary::None,
        norms: Norms {
            before_attention: Some("self_attn_layer_norm"),
            after_attention: None,
            before_mlp: Some("final_layer_norm"),
            after_mlp: None,
        },
        norm: NormKind::Layer,
        epsilon: ("", 1e-5),
        out: "self_attn.out_proj",
        mlp: Mlp::Plain(["fc1", "fc2"]),
        act: ("activation_function", "relu"),
        final_norm: Some("final_layer_norm"),
        tied: true,
        ..LLAMA
    },
    Family {
        model_type: "phi",
        rotary: rotary(1e4, 0.5),
        order: Order::Parallel,
        norms: Norms { before_mlp: None, ..LLAMA.norms },
        norm: NormKind::Layer,
        epsilon: ("layer_norm_eps", 1e-5),
        out: "self_attn.dense",
        qk_norm: Some(QkNorm {
            key: Some("qk_layernorm"),
            names: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
            whole: false,
        }),
        mlp: Mlp::Plain(["mlp.fc1", "mlp.fc2"]),
        act: ("hidden_act", "gelu_new"),
        final_norm: Some("final_layernorm"),
        ..LLAMA
    },
    Family {
        model_type: "phi3",
        epsilon: ("rms_norm_eps", 1e-5),
        qkv: Qkv::Joined("self_attn.qkv_proj"),
        windows: Windows::Always(None),
        mlp: Mlp::Fused(["mlp.gate_up_proj", "mlp.down_proj"]),
        ..LLAMA
    },
    Family { model_type: "qwen2", windows: Windows::Upper, ..LLAMA },
    Family {
        model_type: "qwen3",
        qk_norm: Some(QK_NORM),
        head_dim: Some(128),
        windows: Windows::Upper,
        ..LLAMA
    },
    Family {
        model_type: "qwen3_moe",
        qk_norm: Some(QK_NORM),
        windows: Windows::Switched,
        mlp: Mlp::Experts {
            router: "mlp.gate",
            experts: "mlp.experts",
            gated: ["gate_proj", "up_proj", "down_proj"],
        },
        ..LLAMA
    },
    Family {
        model_type: "smollm3",
        rotary: rotary(2e6, 1.0),
        windows: Windows::Rotationless,
        tied: true,
        ..LLAMA
    },
    Family {
        model_type: "stablelm",
        rotary: rotary(1e4, 0.25),
        norm: NormKind::Layer,
        epsilon: ("layer_norm_eps", 1e-5),
        qk_norm: Some(QkNorm {
            key: Some("qk_layernorm"),
            names: ["self_attn.q_layernorm", "self_attn.k_layernorm"],
            whole: false,
        }),
        ..LLAMA
    },
    Family {
        model_type: "starcoder2",
        norm: NormKind::Layer,
        epsilon: ("norm_epsilon", 1e-5),
        windows: Windows::Always(None),
        mlp: Mlp::Plain(["mlp.c_fc", "mlp.c_proj"]),
        act: ("hidden_act", "gelu_pytorch_tanh"),
        tied: true,
        ..LLAMA
    },
];
