//! Models that are no single ML Program: what they are and what is in them.

use std::{collections::BTreeMap, fmt, path::Path};

use prost::Message;

use super::{
    Interface, interface,
    kinds::{self, PROGRAM},
    proto::coreml as pb,
    undecodable,
    wire::{Field, Fields},
};
use crate::{
    bail,
    error::{Context, Error, Result},
    mil::Program,
};

/// A model of another kind, or a compiled bundle.
#[derive(Debug, Default)]
pub struct Foreign {
    /// Core ML's name of the kind, e.g. `neuralNetwork`; `compiled` for a bundle.
    pub kind: &'static str,
    pub spec_version: i32,
    pub interface: Interface,
    /// Ops or layers, counted by kind.
    pub ops: BTreeMap<String, usize>,
    /// Class names of custom models and layers.
    pub custom: Vec<String>,
    /// What a pipeline runs, in order, by name.
    pub models: Vec<(String, Foreign)>,
    /// Set for an ML Program inside a pipeline.
    pub program: Option<Program>,
}

impl Foreign {
    /// Why this is not taken where a program is wanted.
    pub fn refusal(&self) -> Error {
        let error = Error::new(format!("{self}, not an ML Program"));
        match self.kind {
            "compiled" => error.hint("open the package it was compiled from; a bundle cannot be turned back"),
            _ if !self.models.is_empty() => error.hint("`inspect` lists the models in it"),
            _ => error.hint("convert the original model to an ML Program, iOS 15 and later"),
        }
    }
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            "compiled" => f.write_str("a compiled bundle (`.mlmodelc`)"),
            "pipeline" | "pipelineClassifier" | "pipelineRegressor" => {
                let kinds: Vec<&str> = self.models.iter().map(|(_, m)| m.kind).collect();
                write!(f, "a pipeline of {} models ({})", kinds.len(), kinds.join(", "))
            }
            kind if kind.starts_with("neuralNetwork") => {
                let layers: usize = self.ops.values().sum();
                let plural = if layers == 1 { "" } else { "s" };
                write!(f, "a neural network of {layers} layer{plural} (`{kind}`)")
            }
            kind => write!(f, "a model of the kind `{kind}`"),
        }
    }
}

pub(super) fn read(bytes: &[u8], dir: &Path) -> Result<Foreign> {
    nested(bytes, dir, 0)
}

fn nested(bytes: &[u8], dir: &Path, depth: usize) -> Result<Foreign> {
    if depth > 8 {
        bail!("pipelines within pipelines, more than 8 deep");
    }
    let Some((kind, body)) = kinds::body(bytes)? else {
        return Err(undecodable("it has no model of a known kind"));
    };
    if kind == PROGRAM {
        let (contents, _) = super::program(bytes, dir)?;
        let (interface, spec_version) = (contents.interface, contents.spec_version);
        let ops = op_counts(&contents.program);
        return Ok(Foreign {
            kind,
            spec_version,
            interface,
            ops,
            program: Some(contents.program),
            ..Foreign::default()
        });
    }
    let model = pb::Model::decode(bytes).map_err(undecodable)?;
    let mut foreign = Foreign {
        kind,
        spec_version: model.specification_version,
        interface: interface::decode(model.description.unwrap_or_default(), model.is_updatable),
        ..Foreign::default()
    };
    match kind {
        "neuralNetwork" | "neuralNetworkClassifier" | "neuralNetworkRegressor" => foreign.layers(body)?,
        "pipeline" => foreign.pipeline(body, dir, depth)?,
        "pipelineClassifier" | "pipelineRegressor" => {
            for inner in children(body, 1)? {
                foreign.pipeline(inner, dir, depth)?;
            }
        }
        "customModel" => foreign.custom = texts(body, 10)?,
        _ => {}
    }
    Ok(foreign)
}

impl Foreign {
    fn layers(&mut self, network: &[u8]) -> Result<()> {
        for layer in children(network, 1)? {
            for field in Fields::new(layer) {
                let (number, field) = field.map_err(undecodable)?;
                let (Some(kind), Field::Bytes(body)) = (kinds::layer(number), field) else { continue };
                *self.ops.entry(kind.into()).or_default() += 1;
                if kind == "custom" {
                    self.custom.extend(texts(body, 10)?);
                }
            }
        }
        Ok(())
    }

    fn pipeline(&mut self, body: &[u8], dir: &Path, depth: usize) -> Result<()> {
        let pipeline = pb::Pipeline::decode(body).map_err(undecodable)?;
        for (i, model) in pipeline.models.iter().enumerate() {
            let name = pipeline.names.get(i).cloned().unwrap_or_else(|| format!("model {i}"));
            let inner = nested(model, dir, depth + 1).at(format!("`{name}`"))?;
            self.models.push((name, inner));
        }
        Ok(())
    }
}

/// How often each op occurs in all functions of a program.
pub fn op_counts(program: &Program) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for f in program.functions.values() {
        for block in std::iter::once(&f.body).chain(f.other_bodies.values()) {
            block.walk(&mut |op| *counts.entry(op.kind.clone()).or_default() += 1);
        }
    }
    counts
}

fn children(message: &[u8], wanted: u64) -> Result<Vec<&[u8]>> {
    let mut found = Vec::new();
    for field in Fields::new(message) {
        if let (number, Field::Bytes(body)) = field.map_err(undecodable)?
            && number == wanted
        {
            found.push(body);
        }
    }
    Ok(found)
}

fn texts(message: &[u8], wanted: u64) -> Result<Vec<String>> {
    Ok(children(message, wanted)?.into_iter().map(|b| String::from_utf8_lossy(b).into_owned()).collect())
}
