//! What a function remembers between calls.

use std::collections::BTreeMap;

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
    held: BTreeMap<String, (TensorType, Tensor)>,
}

impl States {
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.held.get(name).map(|(_, t)| t)
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
            let zeros = Tensor::zeros(shape, settle::kind(t.dtype), &Device::Cpu)?;
            states.held.insert(name.into(), (t.clone(), zeros));
        }
        Ok(states)
    }

    /// A reference to the state that a function declares.
    pub(super) fn reference(&self, name: &str, declared: &Type) -> Result<Val> {
        match self.held.get(name) {
            Some((t, _)) if declared.as_state().is_some_and(|d| d.agrees(t)) => Ok(Val::State(name.into())),
            Some((t, _)) => bail!("state `{name}` holds {t}, {declared} is declared"),
            None => bail!("state `{name}` is missing"; hint: "start from the machine's own `states`"),
        }
    }

    pub(super) fn read(&self, name: &str) -> Result<Tensor> {
        match self.get(name) {
            Some(t) => Ok(t.clone()),
            None => bail!("state `{name}` is missing"),
        }
    }

    pub(super) fn write(&mut self, name: &str, value: Val, precision: Precision) -> Result<()> {
        let Some((t, held)) = self.held.get_mut(name) else { bail!("state `{name}` is missing") };
        let value =
            settle::settle(value, &Type::Tensor(t.clone()), precision).at(format!("state `{name}`"))?;
        *held = value.tensor()?.clone();
        Ok(())
    }
}
