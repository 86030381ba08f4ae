//! The feed-forward part of a layer: gated, plain, or routed experts.

use candle_core::{D, Device, Tensor};

use super::{
    family,
    parts::Linear,
    plan::{Experts, Plan},
};
use crate::{
    bail,
    error::Result,
    reference::{model::activation, scope::Scope},
};

#[derive(Clone)]
pub(super) enum Mlp {
    /// Gate, up, down.
    Gated([Linear; 3]),
    /// Gate and up in one, down.
    Fused([Linear; 2]),
    /// Up, down.
    Plain([Linear; 2]),
    Experts {
        router: Linear,
        experts: Vec<Mlp>,
        routing: Experts,
    },
}

impl Mlp {
    pub(super) fn open(plan: &Plan, scope: &Scope<'_>, sparse: bool) -> Result<Mlp> {
        let linear = |name: &str| Linear::open(plan, scope, name);
        let gated = |scope: &Scope<'_>, names: [&str; 3]| {
            let [gate, up, down] = names.map(|name| Linear::open(plan, scope, name));
            Ok(Mlp::Gated([gate?, up?, down?]))
        };
        match (plan.family.mlp, plan.experts) {
            (family::Mlp::Gated(names), _) => gated(scope, names),
            (family::Mlp::Fused([both, down]), _) => Ok(Mlp::Fused([linear(both)?, linear(down)?])),
            (family::Mlp::Plain([up, down]), _) => Ok(Mlp::Plain([linear(up)?, linear(down)?])),
            (family::Mlp::Experts { router, experts, gated: names }, Some(routing)) if sparse => {
                let each = |i: usize| gated(&scope.join(format!("{experts}.{i}")), names);
                Ok(Mlp::Experts {
                    router: linear(router)?.of_shape(routing.count, plan.hidden)?,
                    experts: (0..routing.count).map(each).collect::<Result<_>>()?,
                    routing,
                })
            }
            (family::Mlp::Experts { gated: names, .. }, _) => gated(&scope.join("mlp"), names),
        }
    }

    pub(super) fn linears(&mut self) -> Vec<&mut Linear> {
        match self {
            Mlp::Gated(all) => all.iter_mut().collect(),
            Mlp::Fused(all) | Mlp::Plain(all) => all.iter_mut().collect(),
            Mlp::Experts { router, experts, .. } => {
                std::iter::once(router).chain(experts.iter_mut().flat_map(Mlp::linears)).collect()
            }
        }
    }

    pub(super) fn run(&self, act: &str, x: &Tensor) -> Result<Tensor> {
        match self {
            Mlp::Gated([gate, up, down]) => down.run(&(activation(act, &gate.run(x)?)? * up.run(x)?)?),
            Mlp::Fused([both, down]) => {
                let halves = both.run(x)?.chunk(2, D::Minus1)?;
                let [gate, up] = halves.as_slice() else { bail!("gate and up cannot be taken apart") };
                down.run(&(activation(act, gate)? * up)?)
            }
            Mlp::Plain([up, down]) => down.run(&activation(act, &up.run(x)?)?),
            Mlp::Experts { router, experts, routing } => {
                let tokens = x.flatten_to(1)?;
                let weights = candle_nn::ops::softmax(&router.run(&tokens)?, D::Minus1)?.to_vec2::<f32>()?;
                let chosen: Vec<Vec<(usize, f32)>> = weights.iter().map(|w| routing.choose(w)).collect();
                let mut sum = tokens.zeros_like()?;
                for (i, expert) in experts.iter().enumerate() {
                    sum = expert.add(act, &tokens, &sum, &chosen, i)?;
                }
                Ok(sum.reshape(x.dims())?)
            }
        }
    }

    /// Adds what expert `number` makes of the tokens that chose it.
    fn add(
        &self,
        act: &str,
        tokens: &Tensor,
        sum: &Tensor,
        chosen: &[Vec<(usize, f32)>],
        number: usize,
    ) -> Result<Tensor> {
        let mut rows = Vec::new();
        let mut weights = Vec::new();
        for (row, choice) in (0u32..).zip(chosen) {
            if let Some((_, weight)) = choice.iter().find(|(expert, _)| *expert == number) {
                rows.push(row);
                weights.push(*weight);
            }
        }
        if rows.is_empty() {
            return Ok(sum.clone());
        }
        let count = rows.len();
        let rows = Tensor::from_vec(rows, count, &Device::Cpu)?;
        let weights = Tensor::from_vec(weights, (count, 1), &Device::Cpu)?;
        let made = self.run(act, &tokens.index_select(&rows, 0)?)?.broadcast_mul(&weights)?;
        Ok(sum.index_add(&rows, &made, 0)?)
    }
}

impl Experts {
    /// The experts of one token with their weights.
    fn choose(&self, weights: &[f32]) -> Vec<(usize, f32)> {
        let mut ranked: Vec<(usize, f32)> = weights.iter().copied().enumerate().collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        ranked.truncate(self.per_token);
        let sum: f32 = if self.normalize { ranked.iter().map(|(_, w)| w).sum() } else { 1.0 };
        ranked.into_iter().map(|(expert, w)| (expert, w / sum)).collect()
    }
}
