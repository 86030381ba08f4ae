//! Mixtures of experts, evaluated densely: every expert runs on every token and the router's weights,
//! zero for those not chosen, join them. The same numbers as routing, at the cost of all experts.

use super::{Act, Hidden, Net};
use crate::{error::Result, graph::In, mil::ValueId};

/// A router and its experts, by name.
pub struct Experts<'a> {
    pub router: &'a str,
    /// Prefix of expert `e`: `{experts}.{e}`.
    pub experts: &'a str,
    pub count: usize,
    pub chosen: usize,
    /// Names of the gate, up and down projections inside an expert.
    pub parts: [&'a str; 3],
    pub act: Act,
    /// Whether the chosen weights are divided by their sum.
    pub normalise: bool,
}

impl Net<'_> {
    pub fn experts(&mut self, e: &Experts<'_>, x: Hidden) -> Result<Hidden> {
        let weights = self.routing(e, x)?;
        let weights = self.split_channels(&format!("{}_weights", e.router), weights, 1, e.count)?;
        let mut sum: Option<Hidden> = None;
        for (i, weight) in weights.iter().enumerate() {
            let y = self.within(&format!("{}.{i}", e.experts), |n| {
                let h = n.gated(e.parts, e.act, x)?;
                Ok(Hidden(n.binary("mul", "weighted", h.0, *weight)?))
            })?;
            sum = Some(match sum {
                Some(sum) => Hidden(self.binary("add", &format!("{}_sum", e.experts), sum.0, y.0)?),
                None => y,
            });
        }
        sum.ok_or_else(|| crate::Error::new(format!("{}: there are no experts", self.place(e.experts))))
    }

    /// Weights of the experts `[1, E, 1, T]`, zero for those not chosen.
    fn routing(&mut self, e: &Experts<'_>, x: Hidden) -> Result<ValueId> {
        let name = e.router;
        let logits = self.linear(name, x)?;
        let shares =
            self.op("softmax", &format!("{name}_softmax"), [("x", logits.into()), ("axis", 1.into())])?;
        let k = i32::try_from(e.chosen).unwrap_or(i32::MAX);
        let best = self.ops(
            "topk",
            &format!("{name}_best"),
            [("x", shares.into()), ("k", k.into()), ("axis", 1.into()), ("ascending", false.into())],
        )?;
        let least = self.op(
            "reduce_min",
            &format!("{name}_least"),
            [("x", best[0].into()), ("axes", [1].into()), ("keep_dims", true.into())],
        )?;
        let chosen = self.binary("greater_equal", &format!("{name}_chosen"), shares, least)?;
        let zero = self.scalar(0.0);
        let kept = self.op(
            "select",
            &format!("{name}_kept"),
            [("cond", chosen.into()), ("a", shares.into()), ("b", zero)],
        )?;
        if !e.normalise {
            return Ok(kept);
        }
        let sum = self.op(
            "reduce_sum",
            &format!("{name}_total"),
            [("x", In::from(kept)), ("axes", [1].into()), ("keep_dims", true.into())],
        )?;
        self.binary("real_div", &format!("{name}_shares"), kept, sum)
    }
}
