//! A function under construction, seen from an architecture.
//!
//! BC1S: every activation is a tensor `[B, C, 1, S]`, channels where images have theirs and the sequence
//! along the width. A linear layer is then a 1×1 convolution, and nothing but the attention's keys needs
//! a transpose:
//!
//! ```text
//!        S →                conv W[O, C, 1, 1]
//!   C  ┌───────────┐   ──────────────────────►   O ┌───────────┐
//!   ↓  └───────────┘                             ↓ └───────────┘
//! ```
//!
//! Names are the checkpoint's own, relative to the scope: `within("encoder.layer.0", …)`, then
//! `linear("attention.self.query", x)`. Results are named after the same places.

use crate::{
    bail,
    checkpoint::Checkpoint,
    error::{Context, Error, Result},
    graph::{Builder, In},
    mil::{Const, DType, ValueId, Weight},
};

/// A value known to be `[B, C, 1, S]`.
#[derive(Debug, Clone, Copy)]
pub struct Hidden(pub ValueId);

pub struct Net<'a> {
    pub checkpoint: &'a Checkpoint,
    pub builder: Builder,
    /// Element type of weights and activations.
    pub float: DType,
    pub batch: usize,
    pub tokens: usize,
    /// Whether linear weights are stored `[in, out]`, as GPT-2's are.
    pub transposed_linears: bool,
    /// The residual stream is kept this much smaller than the checkpoint's, so that it fits fp16.
    pub residual: f32,
    /// Whether logits stay in the pieces that the vocabulary is projected in.
    pub split_head: bool,
    scope: String,
}

impl<'a> Net<'a> {
    pub fn new(
        checkpoint: &'a Checkpoint,
        builder: Builder,
        float: DType,
        batch: usize,
        tokens: usize,
    ) -> Self {
        Self {
            checkpoint,
            builder,
            float,
            batch,
            tokens,
            transposed_linears: false,
            residual: 1.0,
            split_head: false,
            scope: String::new(),
        }
    }

    /// Runs `f` with names relative to `name`.
    pub fn within<T>(&mut self, name: &str, f: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let outer = self.scope.clone();
        self.scope = self.place(name);
        let result = f(self);
        self.scope = outer;
        result
    }

    /// The checkpoint's full name of a place in this scope.
    pub fn place(&self, name: &str) -> String {
        match (self.scope.as_str(), name) {
            ("", name) => name.into(),
            (scope, "") => scope.into(),
            (scope, name) => format!("{scope}.{name}"),
        }
    }

    pub fn has(&self, name: &str) -> bool {
        self.checkpoint.tensors.contains(&self.place(name))
    }

    /// A tensor of the checkpoint, in its own element type.
    pub fn source(&self, name: &str) -> Result<Weight> {
        self.checkpoint.tensors.float_weight(&self.place(name))
    }

    /// A tensor as a weight of the program, given the shape it is used in.
    pub fn weight(&self, name: &str, shape: impl Into<Vec<usize>>) -> Result<Weight> {
        Ok(self.store(&self.source(name)?, "", shape, Ok))
    }

    /// A weight of the program made from a tensor's elements.
    pub fn store(
        &self,
        source: &Weight,
        how: &str,
        shape: impl Into<Vec<usize>>,
        f: impl Fn(Vec<f32>) -> Result<Vec<f32>> + Send + Sync + 'static,
    ) -> Weight {
        let shape = shape.into();
        // The shape is no part of the key: the same bytes serve a table and the head that is tied to it.
        let how = format!("{how} {}", self.float);
        let tensor = format!("tensor `{}`", source.key.trim_start_matches("ckpt:"));
        source.map(how.trim_start(), self.float, shape, move |values| f(finite(values).at(&tensor)?))
    }

    /// The elements of a small tensor, for decisions that depend on them.
    pub fn values(&self, name: &str) -> Result<Vec<f32>> {
        self.source(name)?.floats()
    }

    /// A constant tensor in the program's element type.
    pub fn constant(&self, key: &str, shape: &[usize], values: Vec<f32>) -> In {
        // The limit of coremltools for literals; the format itself has none.
        if values.len() < 10 {
            return Const::floats(self.float, shape, &values).into();
        }
        let float = self.float;
        let key = format!("{key} {float} {shape:?}");
        Weight::new(
            key,
            float,
            shape,
            move || Ok(crate::mil::constant::encode_floats(float, &values)?.into()),
        )
        .into()
    }

    /// A constant tensor whose values are made when they are written.
    pub fn constant_later(
        &self,
        key: &str,
        shape: &[usize],
        values: impl Fn() -> Vec<f32> + Send + Sync + 'static,
    ) -> Weight {
        let float = self.float;
        let key = format!("{key} {float} {shape:?}");
        Weight::new(key, float, shape, move || {
            Ok(crate::mil::constant::encode_floats(float, &values())?.into())
        })
    }

    /// A float scalar in the program's element type.
    pub fn scalar(&self, v: f32) -> In {
        In::float(self.float, v)
    }

    /// Adds an op with one result, named after `name` in this scope.
    pub fn op<const N: usize>(&mut self, kind: &str, name: &str, params: [(&str, In); N]) -> Result<ValueId> {
        let place = self.place(name);
        self.builder.op(kind, &place, params)
    }

    pub fn ops<const N: usize>(
        &mut self,
        kind: &str,
        name: &str,
        params: [(&str, In); N],
    ) -> Result<Vec<ValueId>> {
        let place = self.place(name);
        self.builder.ops(kind, &place, params)
    }

    pub fn binary(&mut self, kind: &str, name: &str, x: impl Into<In>, y: impl Into<In>) -> Result<ValueId> {
        self.op(kind, name, [("x", x.into()), ("y", y.into())])
    }

    /// The residual sum.
    pub fn add(&mut self, x: Hidden, y: Hidden) -> Result<Hidden> {
        Ok(Hidden(self.binary("add", "add", x.0, y.0)?))
    }

    /// x times a factor; nothing for 1.
    pub fn scale(&mut self, name: &str, x: Hidden, by: f32) -> Result<Hidden> {
        if by == 1.0 {
            return Ok(x);
        }
        let by = self.scalar(by);
        Ok(Hidden(self.binary("mul", name, x.0, by)?))
    }

    /// Every piece times a factor.
    pub fn scale_each(&mut self, name: &str, pieces: Vec<Hidden>, by: f32) -> Result<Vec<Hidden>> {
        pieces.into_iter().map(|x| self.scale(name, x, by)).collect()
    }

    pub fn channels(&self, x: Hidden) -> Result<usize> {
        match self.builder.shape(x.0)?.as_slice() {
            [_, c, 1, _] => Ok(*c),
            other => Err(Error::new(format!("{other:?} is no [batch, channels, 1, sequence]"))),
        }
        .at(&self.scope)
    }
}

/// Refuses what no trained weight is, in fp32 too.
fn finite(values: Vec<f32>) -> Result<Vec<f32>> {
    match values.iter().filter(|v| !v.is_finite()).count() {
        0 => Ok(values),
        n => {
            bail!("{n} of {} values are not finite", values.len(); hint: "the checkpoint is damaged, or its training diverged")
        }
    }
}

impl From<Hidden> for In {
    fn from(x: Hidden) -> In {
        x.0.into()
    }
}
