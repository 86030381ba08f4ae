//! Refusing checkpoints whose weights are packed by another quantizer.

use serde_json::Value;

use super::{Config, Tensors};
use crate::{bail, error::Result};

/// Ends of tensor names that give a packed weight away, and who writes them.
const TELLTALES: [(&str, &str); 9] = [
    (".qweight", "gptq or awq"),
    (".qzeros", "gptq or awq"),
    (".g_idx", "gptq"),
    (".absmax", "bitsandbytes"),
    (".quant_map", "bitsandbytes"),
    (".SCB", "bitsandbytes"),
    (".weight_packed", "compressed-tensors"),
    ("_blocks", "mxfp4"),
    (".bitsandbytes__nf4", "bitsandbytes"),
];

/// Only `fp8` with block scales can be read.
pub(super) fn refuse_packed(config: &Config, tensors: &Tensors) -> Result<()> {
    let method = config
        .get(&["quantization_config"])
        .map(|q| q.get("quant_method").and_then(Value::as_str).unwrap_or("a method that it does not name"));
    let telltale = tensors
        .names()
        .find_map(|name| TELLTALES.iter().find(|(end, _)| name.ends_with(end)).map(|(_, who)| (name, *who)));
    let path = config.path().display();
    let seen = match (method, telltale) {
        (None, None) | (Some("fp8"), None) => return Ok(()),
        (Some(method), Some((name, _))) => {
            format!("{path}: the checkpoint is quantized with {method} (tensor `{name}`)")
        }
        (Some(method), None) => format!("{path}: the checkpoint is quantized with {method}"),
        (None, Some((name, who))) => {
            format!("tensor `{name}`: the checkpoint is quantized, probably with {who}")
        }
    };
    bail!("{seen}; packed weights cannot be read"; hint: "convert the original checkpoint, and quantize it here");
}

/// The block of `fp8` scales: `weight_block_size`, 128 × 128 unless told.
pub(super) fn fp8_block(config: &Config) -> [usize; 2] {
    let size = |i: usize| {
        let sizes = config.get(&["quantization_config"])?.get("weight_block_size")?;
        usize::try_from(sizes.get(i)?.as_u64()?).ok().filter(|n| *n > 0)
    };
    [size(0).unwrap_or(128), size(1).unwrap_or(128)]
}
