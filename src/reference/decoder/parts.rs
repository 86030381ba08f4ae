//! Linear layers and norms with their weights.

use std::sync::Arc;

use candle_core::{D, Tensor};

use super::{family::NormKind, plan::Plan};
use crate::{
    bail,
    error::{Context, Result},
    reference::{
        scope::{Scope, layer_norm, project},
        watch::Watch,
    },
};

#[derive(Clone)]
pub(super) struct Linear {
    /// The checkpoint's name of the weight.
    pub(super) path: String,
    /// `[out, in]`
    pub(super) weight: Tensor,
    bias: Option<Tensor>,
    pub(super) watch: Option<Arc<Watch>>,
}

impl Linear {
    pub(super) fn open(plan: &Plan, scope: &Scope<'_>, name: &str) -> Result<Linear> {
        let layer = scope.join(name);
        let weight = layer.tensor("weight")?;
        let weight = if plan.family.transposed { weight.t().at(layer.path("weight"))? } else { weight };
        Linear::of(&layer, weight)
    }

    /// The layer at `scope` with a weight from elsewhere.
    pub(super) fn of(scope: &Scope<'_>, weight: Tensor) -> Result<Linear> {
        let bias = scope.has("bias").then(|| scope.tensor("bias")).transpose()?;
        let path = scope.path("weight");
        weight.dims2().at(&path)?;
        Ok(Linear { path, weight, bias, watch: None })
    }

    /// Holds the weight to the shape that the config implies.
    pub(super) fn of_shape(self, out: usize, channels: usize) -> Result<Linear> {
        if self.weight.dims() != [out, channels] {
            bail!("{}: {:?}, the config implies {:?}", self.path, self.weight.dims(), [out, channels]);
        }
        Ok(self)
    }

    pub(super) fn run(&self, x: &Tensor) -> Result<Tensor> {
        let Some(watch) = &self.watch else {
            return project(x, &self.weight, self.bias.as_ref()).at(&self.path);
        };
        let y = watch.project(&self.path, x, &self.weight).at(&self.path)?;
        self.bias.as_ref().map_or(Ok(y.clone()), |bias| y.broadcast_add(bias)).at(&self.path)
    }
}

#[derive(Clone)]
pub(super) struct Norm {
    path: String,
    kind: NormKind,
    weight: Tensor,
    bias: Option<Tensor>,
    epsilon: f64,
}

impl Norm {
    pub(super) fn open(plan: &Plan, scope: &Scope<'_>, name: &str) -> Result<Norm> {
        let layer = scope.join(name);
        let weight = if layer.has("weight") || !layer.has("norms.0.weight") {
            layer.tensor("weight")?
        } else {
            per_head(&layer)?
        };
        let bias = layer.has("bias").then(|| layer.tensor("bias")).transpose()?;
        let weight = if plan.family.norm == NormKind::RmsPlusOne { (weight + 1.0)? } else { weight };
        Ok(Norm { path: layer.path("weight"), kind: plan.family.norm, weight, bias, epsilon: plan.epsilon })
    }

    pub(super) fn run(&self, x: &Tensor) -> Result<Tensor> {
        if self.kind == NormKind::Layer {
            return layer_norm(x, &self.weight, self.bias.as_ref(), self.epsilon).at(&self.path);
        }
        let square = x.sqr()?.mean_keepdim(D::Minus1)?;
        let normal = x.broadcast_div(&(square + self.epsilon)?.sqrt()?)?;
        normal.broadcast_mul(&self.weight).at(&self.path)
    }
}

/// A norm for each head, `[heads, channels]`.
fn per_head(scope: &Scope<'_>) -> Result<Tensor> {
    let names = (0..).map(|i| format!("norms.{i}.weight")).take_while(|name| scope.has(name));
    let weights = names.map(|name| scope.tensor(&name)).collect::<Result<Vec<_>>>()?;
    Tensor::stack(&weights, 0).at(scope.path("norms"))
}
