//! A place in the checkpoint, and the layers that are read there.

use std::fmt::Display;

use candle_core::{D, Device, Tensor};

use crate::{
    bail,
    checkpoint::Tensors,
    error::{Context, Error, Result},
};

#[derive(Clone)]
pub(super) struct Scope<'a> {
    tensors: &'a Tensors,
    prefix: String,
}

impl<'a> Scope<'a> {
    pub(super) fn root(tensors: &'a Tensors) -> Scope<'a> {
        Scope { tensors, prefix: String::new() }
    }

    pub(super) fn join(&self, name: impl Display) -> Scope<'a> {
        let prefix = if self.prefix.is_empty() { name.to_string() } else { self.path(name) };
        Scope { tensors: self.tensors, prefix }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.contains(&self.path(name))
    }

    pub(super) fn tensor(&self, name: &str) -> Result<Tensor> {
        let path = self.path(name);
        let shape = self.tensors.shape(&path)?;
        Tensor::from_vec(self.tensors.floats(&path)?, shape, &Device::Cpu).at(path)
    }

    /// `x · Wᵀ`, plus the bias if there is one.
    pub(super) fn linear(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let layer = self.join(name);
        let bias = layer.has("bias").then(|| layer.tensor("bias")).transpose()?;
        project(x, &layer.tensor("weight")?, bias.as_ref()).at(&layer.prefix)
    }

    /// Normalization over the channels; without a bias tensor there is no bias.
    pub(super) fn layer_norm(&self, name: &str, x: &Tensor, epsilon: f64) -> Result<Tensor> {
        let layer = self.join(name);
        let bias = layer.has("bias").then(|| layer.tensor("bias")).transpose()?;
        layer_norm(x, &layer.tensor("weight")?, bias.as_ref(), epsilon).at(&layer.prefix)
    }

    /// The rows of a table at `ids`, `[batch, sequence, channels]`.
    pub(super) fn embedding(&self, name: &str, ids: &[Vec<u32>]) -> Result<Tensor> {
        let layer = self.join(name);
        rows(&layer.tensor("weight")?, ids).at(&layer.prefix)
    }

    /// The error for a tensor that is not there.
    pub(super) fn missing(&self, name: &str) -> Error {
        self.tensors.missing(&self.path(name))
    }

    pub(super) fn path(&self, name: impl Display) -> String {
        if self.prefix.is_empty() { name.to_string() } else { format!("{}.{name}", self.prefix) }
    }
}

/// `x · weightᵀ + bias` over the last axis.
pub(super) fn project(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    // A matrix of all tokens: broadcasting over the batch would copy the weight.
    let (out, _) = weight.dims2()?;
    let mut dims = x.dims().to_vec();
    let channels = dims.pop().unwrap_or(1);
    let y = x.reshape(((), channels))?.matmul(&weight.t()?)?;
    dims.push(out);
    let y = y.reshape(dims)?;
    Ok(match bias {
        Some(bias) => y.broadcast_add(bias)?,
        None => y,
    })
}

/// Normalization over the last axis.
pub(super) fn layer_norm(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, epsilon: f64) -> Result<Tensor> {
    let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = centered.sqr()?.mean_keepdim(D::Minus1)?;
    let normal = centered.broadcast_div(&(variance + epsilon)?.sqrt()?)?;
    let scaled = normal.broadcast_mul(weight)?;
    Ok(match bias {
        Some(bias) => scaled.broadcast_add(bias)?,
        None => scaled,
    })
}

/// The rows of a table at `ids`, `[batch, sequence, channels]`.
pub(super) fn rows(table: &Tensor, ids: &[Vec<u32>]) -> Result<Tensor> {
    let (rows, channels) = table.dims2()?;
    let flat: Vec<u32> = ids.iter().flatten().copied().collect();
    if let Some(id) = flat.iter().find(|id| usize::try_from(**id).is_ok_and(|id| id >= rows)) {
        bail!("index {id}, the table has {rows} rows");
    }
    let count = flat.len();
    let picked = table.index_select(&Tensor::from_vec(flat, count, &Device::Cpu)?, 0)?;
    Ok(picked.reshape((ids.len(), count / ids.len().max(1), channels))?)
}
