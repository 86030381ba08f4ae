//! What a language model has before its layers and after them.

use candle_core::Tensor;

use super::{
    attention::Places,
    parts::{Linear, Norm},
    plan::Plan,
};
use crate::{
    error::{Context, Result},
    reference::{
        Inputs,
        scope::{Scope, rows},
    },
};

/// From ids to what the first layer is given.
#[derive(Clone)]
pub(super) struct Entry {
    pub(super) words: Tensor,
    /// The checkpoint's name of `words`.
    pub(super) path: String,
    norm: Option<Norm>,
    pub(super) project: Option<Linear>,
    /// Learned positions, and the row of position 0.
    positions: Option<(Tensor, u32)>,
}

/// From what the last layer gives to what the head is given.
#[derive(Clone)]
pub(super) struct Exit {
    norm: Option<Norm>,
    /// What a rotated model adds where its head is tied.
    scale: Option<Linear>,
    project: Option<Linear>,
}

/// The checkpoint's name of the head's weight, and whether it is that of the words, to which it is tied.
pub(super) fn head_weight(plan: &Plan, root: &Scope<'_>, base: &Scope<'_>) -> (String, bool) {
    let head = root.join(plan.family.head);
    match plan.tied && !head.has("weight") {
        true => (base.join(plan.family.words).path("weight"), true),
        false => (head.path("weight"), false),
    }
}

fn projection(plan: &Plan, base: &Scope<'_>, name: &str) -> Result<Option<Linear>> {
    base.has(&format!("{name}.weight")).then(|| Linear::open(plan, base, name)).transpose()
}

impl Entry {
    pub(super) fn open(plan: &Plan, base: &Scope<'_>) -> Result<Entry> {
        let words = base.join(plan.family.words);
        let positions = match plan.family.positions {
            Some((name, first)) => Some((base.join(name).tensor("weight")?, first)),
            None => None,
        };
        Ok(Entry {
            words: words.tensor("weight")?,
            path: words.path("weight"),
            norm: plan.family.words_norm.map(|name| Norm::open(plan, base, name)).transpose()?,
            project: projection(plan, base, "project_in")?,
            positions,
        })
    }

    pub(super) fn run(&self, plan: &Plan, inputs: &Inputs, places: &Places) -> Result<Tensor> {
        let mut x = (rows(&self.words, &inputs.input_ids).at(plan.family.words)? * plan.words_scale)?;
        if let Some(norm) = &self.norm {
            x = norm.run(&x)?;
        }
        if let Some(project) = &self.project {
            x = project.run(&x)?;
        }
        if let Some((table, first)) = &self.positions {
            let index: Vec<Vec<u32>> =
                places.positions.iter().map(|row| row.iter().map(|p| p + first).collect()).collect();
            x = (x + rows(table, &index).at("positions")?)?;
        }
        Ok(x)
    }
}

impl Exit {
    pub(super) fn open(plan: &Plan, base: &Scope<'_>) -> Result<Exit> {
        Ok(Exit {
            norm: plan.family.final_norm.map(|name| Norm::open(plan, base, name)).transpose()?,
            scale: projection(plan, base, "norm_scale")?,
            project: projection(plan, base, "project_out")?,
        })
    }

    pub(super) fn linears(&mut self) -> impl Iterator<Item = &mut Linear> {
        self.scale.iter_mut().chain(&mut self.project)
    }

    pub(super) fn run(&self, x: &Tensor) -> Result<Tensor> {
        let mut x = x.clone();
        if let Some(norm) = &self.norm {
            x = norm.run(&x)?;
        }
        if let Some(scale) = &self.scale {
            x = (&x + scale.run(&x)?)?;
        }
        if let Some(project) = &self.project {
            x = project.run(&x)?;
        }
        Ok(x)
    }
}
