//! Activation functions, by the names that Hugging Face configs use.

use super::{Hidden, Net};
use crate::{bail, error::Result, mil::ValueId};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    Gelu,
    GeluTanh,
    QuickGelu,
    Relu,
    Relu6,
    Silu,
    Tanh,
    Sigmoid,
}

impl Act {
    pub fn parse(name: &str) -> Result<Act> {
        Ok(match name {
            "gelu" => Act::Gelu,
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" | "gelu_accurate" => Act::GeluTanh,
            "quick_gelu" => Act::QuickGelu,
            "relu" => Act::Relu,
            "relu6" => Act::Relu6,
            "silu" | "swish" => Act::Silu,
            "tanh" => Act::Tanh,
            "sigmoid" => Act::Sigmoid,
            other => {
                bail!("activation `{other}` is not supported"; hint: "supported are gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, quick_gelu, relu, relu6, silu, tanh and sigmoid")
            }
        })
    }
}

impl Net<'_> {
    pub fn act(&mut self, act: Act, x: Hidden) -> Result<Hidden> {
        Ok(Hidden(self.act_value(act, x.0)?))
    }

    fn act_value(&mut self, act: Act, x: ValueId) -> Result<ValueId> {
        let x = ("x", x.into());
        match act {
            Act::Gelu => self.op("gelu", "gelu", [x, ("mode", "EXACT".into())]),
            Act::GeluTanh => self.op("gelu", "gelu", [x, ("mode", "TANH_APPROXIMATION".into())]),
            Act::QuickGelu => self.op("gelu", "gelu", [x, ("mode", "SIGMOID_APPROXIMATION".into())]),
            Act::Relu => self.op("relu", "relu", [x]),
            Act::Relu6 => self.op("relu6", "relu6", [x]),
            Act::Silu => self.op("silu", "silu", [x]),
            Act::Tanh => self.op("tanh", "tanh", [x]),
            Act::Sigmoid => self.op("sigmoid", "sigmoid", [x]),
        }
    }
}
