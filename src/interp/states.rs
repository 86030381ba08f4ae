//! What a function remembers between calls.

use std::{collections::BTreeMap, sync::Arc};

use candle_core::{Device, Tensor};

use super::{Precision, settle};
use crate::{
    bail,
    error::{Context, Result},
    mil::{Function, TensorType, Type},
    ops::Val,
};

/// Tensors by name; functions that name the same state share it.
#[derive(Debug, Clone, Default)]
pub struct States {
    held: BTreeMap<String, Held>,
}

#[derive(Debug, Clone)]
struct Held {
    ty: TensorType,
    tensor: Tensor,
    /// Something else may hold the tensor's buffer.
    shared: bool,
    /// One for each clone that has the same buffer.
    clones: Arc<()>,
}

impl States {
    /// A copy of what a state holds.
    pub fn get(&self, name: &str) -> Option<Tensor> {
        self.held.get(name).and_then(|h| h.tensor.force_contiguous().ok())
    }

    /// Fills a state; a later call starts from it.
    pub fn set(&mut self, name: &str, value: Tensor) -> Result<()> {
        self.write(name, value.into(), Precision::Fp32)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.held.keys().map(String::as_str)
    }

    pub(super) fn zeros(function: &Function) -> Result<States> {
        let mut states = States::default();
        for id in &function.inputs {
            let (name, Type::State(held)) = (function.name(*id), function.ty(*id)) else { continue };
            let Some(t) = held.as_tensor() else {
                bail!("state `{name}` holds {held}, a tensor is expected")
            };
            let (Some(shape), Some(count)) = (t.shape(), t.count()) else {
                bail!("state `{name}` is {t}, fixed sizes are expected");
            };
            if count > 1 << 31 {
                bail!("state `{name}` is {t}, more than 2^31 elements");
            }
            let tensor = Tensor::zeros(shape, settle::kind(t.dtype), &Device::Cpu)?;
            let held = Held { ty: t.clone(), tensor, shared: false, clones: Arc::new(()) };
            states.held.insert(name.into(), held);
        }
        Ok(states)
    }

    /// A reference to the state that a function declares.
    pub(super) fn reference(&self, name: &str, declared: &Type) -> Result<Val> {
        match self.held.get(name) {
            Some(h) if declared.as_state().is_some_and(|d| d.agrees(&h.ty)) => Ok(Val::State(name.into())),
            Some(h) => bail!("state `{name}` holds {}, {declared} is declared", h.ty),
            None => bail!("state `{name}` is missing"; hint: "start from the machine's own `states`"),
        }
    }

    /// What a state holds; `keep` says that the result may be kept beyond the run.
    pub(super) fn read(&mut self, name: &str, keep: bool) -> Result<Tensor> {
        let held = self.held(name)?;
        held.shared |= keep;
        Ok(held.tensor.clone())
    }

    pub(super) fn write(&mut self, name: &str, value: Val, precision: Precision) -> Result<()> {
        let held = self.held(name)?;
        let value = settle::settle(value, &Type::Tensor(held.ty.clone()), precision, false)
            .at(format!("state `{name}`"))?;
        held.tensor = value.tensor()?.clone();
        held.shared = true;
        Ok(())
    }

    /// Changes what a state holds in place, in a copy where its buffer is not its own.
    pub(super) fn update(
        &mut self,
        name: &str,
        keep: bool,
        change: impl FnOnce(&Tensor) -> Result<()>,
    ) -> Result<Tensor> {
        let held = self.held(name)?;
        if held.shared || Arc::strong_count(&held.clones) > 1 {
            held.tensor = held.tensor.force_contiguous()?;
            held.clones = Arc::new(());
        }
        held.shared = keep;
        change(&held.tensor)?;
        Ok(held.tensor.clone())
    }

    fn held(&mut self, name: &str) -> Result<&mut Held> {
        match self.held.get_mut(name) {
            Some(held) => Ok(held),
            None => bail!("state `{name}` is missing"),
        }
    }
}
