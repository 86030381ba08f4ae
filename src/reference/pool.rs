//! One vector a text, as sentence-transformers computes it.

use candle_core::{Device, Tensor};

use super::model::Model;
use crate::{
    checkpoint::{Pooling, PoolingMode},
    error::{Context, Result},
};

/// Pooled and normalized as the checkpoint's files say, the mean without them: `[batch, channels]`.
pub(super) fn embedding(model: &Model<'_>, hidden: &Tensor) -> Result<Tensor> {
    let pooling = model.checkpoint.pooling()?.unwrap_or(Pooling {
        mode: PoolingMode::Mean,
        normalize: false,
        max_sequence_length: None,
    });
    let pooled =
        pool(pooling.mode, hidden, &model.inputs.attention_mask).within(|| "while pooling".into())?;
    if !pooling.normalize {
        return Ok(pooled);
    }
    let length = pooled.sqr()?.sum_keepdim(1)?.sqrt()?;
    Ok(pooled.broadcast_div(&length.maximum(1e-12)?)?)
}

pub(super) fn pool(mode: PoolingMode, hidden: &Tensor, attention_mask: &[Vec<u32>]) -> Result<Tensor> {
    let (batch, sequence, _) = hidden.dims3()?;
    let flat: Vec<f32> = attention_mask.iter().flatten().map(|m| if *m == 0 { 0.0 } else { 1.0 }).collect();
    let mask = Tensor::from_vec(flat, (batch, sequence, 1), &Device::Cpu)?;
    let sum = || hidden.broadcast_mul(&mask)?.sum(1);
    let count = mask.sum(1)?.maximum(1e-9)?;
    Ok(match mode {
        PoolingMode::Mean => sum()?.broadcast_div(&count)?,
        PoolingMode::MeanSqrtLen => sum()?.broadcast_div(&count.sqrt()?)?,
        PoolingMode::Max => {
            let low = ((1.0 - &mask)? * -1e9)?;
            hidden.broadcast_mul(&mask)?.broadcast_add(&low)?.max(1)?
        }
        PoolingMode::Cls => hidden.narrow(1, 0, 1)?.squeeze(1)?,
        PoolingMode::LastToken => {
            let last = |row: &Vec<u32>| row.iter().rposition(|m| *m != 0).unwrap_or(0);
            let rows = attention_mask.iter().enumerate();
            let picked: candle_core::Result<Vec<Tensor>> =
                rows.map(|(i, row)| hidden.get(i)?.narrow(0, last(row), 1)).collect();
            Tensor::cat(&picked?, 0)?
        }
    })
}
