//! What a model says about itself: its functions' inputs, outputs and states, and its metadata.
//!
//! Core ML reads the interface, not the program, when it is asked for inputs; the two must agree, and
//! [`problems`] says where they do not.

mod rules;
mod wire;

use std::{collections::BTreeMap, fmt};

pub use rules::problems;
pub(super) use wire::{decode, encode};

use crate::{
    bail,
    error::{Context, Result},
    mil::{DType, Function, Program, TensorType, Type, types::shape_text},
};

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Interface {
    /// One named `main` unless `multi_function`.
    pub functions: Vec<FunctionInterface>,
    /// Whether the functions are described one by one. An entry without a name then holds what is
    /// wrongly described for the model as a whole.
    pub multi_function: bool,
    /// Names one of the functions of a multi-function model, else empty.
    pub default_function: String,
    pub training_inputs: Vec<Feature>,
    pub metadata: Metadata,
    pub updatable: bool,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct FunctionInterface {
    pub name: String,
    pub inputs: Vec<Feature>,
    pub outputs: Vec<Feature>,
    pub states: Vec<Feature>,
    /// The output that is a classifier's label.
    pub predicted_feature: String,
    /// The output that has a classifier's probabilities.
    pub predicted_probabilities: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Metadata {
    pub description: String,
    pub version: String,
    pub author: String,
    pub license: String,
    pub user_defined: BTreeMap<String, String>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Feature {
    pub name: String,
    pub description: String,
    pub optional: bool,
    pub ty: FeatureType,
}

#[derive(Debug, Clone, PartialEq)]
pub enum FeatureType {
    Unset,
    Int64,
    Double,
    String,
    Image(Image),
    Array(Array),
    Dictionary(Key),
    Sequence { element: Key, sizes: Option<SizeRange> },
    State(Option<Array>),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    pub dtype: Option<DType>,
    /// The default shape when sizes are flexible; empty when an output's shape is not known.
    pub shape: Vec<i64>,
    pub sizes: Sizes<Vec<i64>, Vec<SizeRange>>,
    /// The value that an optional input has when it is left out.
    pub default: Option<DefaultValue>,
}

/// Which sizes are accepted beside the default.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Sizes<One, Range> {
    #[default]
    Fixed,
    OneOf(Vec<One>),
    Range(Range),
}

/// Bounds of a size, both inclusive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeRange {
    pub lower: u64,
    /// Negative for no bound.
    pub upper: i64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum DefaultValue {
    Int(i32),
    Float(f32),
    Double(f64),
}

#[derive(Debug, Clone, PartialEq)]
pub struct Image {
    pub width: i64,
    pub height: i64,
    pub color: ColorSpace,
    pub sizes: Sizes<(u64, u64), Option<(SizeRange, SizeRange)>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColorSpace {
    Unset,
    Gray,
    Rgb,
    Bgr,
    GrayFloat16,
}

/// What a dictionary is indexed by, or what a sequence holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    Unset,
    Int64,
    String,
}

impl Interface {
    /// The interface of a program with fixed input sizes, as silane builds it: one function `main`, or
    /// several and the name of the default.
    pub fn of(program: &Program) -> Result<Self> {
        let multi_function = program.functions.len() != 1 || !program.functions.contains_key("main");
        if multi_function && !program.functions.contains_key(&program.default_function) {
            bail!("the default function `{}` is not among the program's functions", program.default_function);
        }
        let functions = program.functions.iter().map(|(name, f)| describe(name, f).at(name));
        Ok(Self {
            functions: functions.collect::<Result<_>>()?,
            multi_function,
            default_function: if multi_function { program.default_function.clone() } else { String::new() },
            ..Self::default()
        })
    }

    /// Sets the descriptions of inputs, outputs and states, in every function that has them.
    pub fn describe(&mut self, docs: &BTreeMap<String, String>) {
        for f in &mut self.functions {
            for feature in f.inputs.iter_mut().chain(&mut f.outputs).chain(&mut f.states) {
                if let Some(doc) = docs.get(&feature.name) {
                    feature.description.clone_from(doc);
                }
            }
        }
    }

    pub fn function(&self, name: &str) -> Option<&FunctionInterface> {
        self.functions.iter().find(|f| f.name == name)
    }
}

impl Feature {
    pub fn new(name: impl Into<String>, ty: FeatureType) -> Self {
        Self { name: name.into(), description: String::new(), optional: false, ty }
    }
}

impl Array {
    /// An array of a fixed shape.
    pub fn fixed(dtype: DType, shape: &[usize]) -> Self {
        let shape = shape.iter().map(|n| i64::try_from(*n).unwrap_or(i64::MAX)).collect();
        Self { dtype: Some(dtype), shape, sizes: Sizes::Fixed, default: None }
    }
}

fn describe(name: &str, f: &Function) -> Result<FunctionInterface> {
    let mut described = FunctionInterface { name: name.into(), ..FunctionInterface::default() };
    for id in &f.inputs {
        let v = f.value(*id);
        let shape = |t: &TensorType| match t.shape() {
            Some(shape) => Ok(Array::fixed(t.dtype, &shape)),
            None => bail!("`{}`: {t} has a flexible size, which only an interface can bound", v.name),
        };
        match &v.ty {
            Type::Tensor(t) => described.inputs.push(Feature::new(&v.name, FeatureType::Array(shape(t)?))),
            Type::State(s) if s.as_tensor().is_some() => {
                let array = s.as_tensor().map(shape).transpose()?;
                described.states.push(Feature::new(&v.name, FeatureType::State(array)));
            }
            other => bail!("input `{}`: {other} cannot be an input", v.name),
        }
    }
    for id in &f.body.outputs {
        let v = f.value(*id);
        let ty = output_type(&v.ty).at(format!("output `{}`", v.name))?;
        described.outputs.push(Feature::new(&v.name, ty));
    }
    Ok(described)
}

/// Arrays, and the label and probabilities of `classify`.
fn output_type(ty: &Type) -> Result<FeatureType> {
    Ok(match ty {
        Type::Tensor(t) if t.dtype == DType::String => FeatureType::String,
        Type::Tensor(t) if t.dtype == DType::I64 => FeatureType::Int64,
        Type::Tensor(t) => FeatureType::Array(Array::fixed(t.dtype, &t.shape().unwrap_or_default())),
        Type::Dict(key, _) => FeatureType::Dictionary(match key.as_tensor().map(|t| t.dtype) {
            Some(DType::String) => Key::String,
            _ => Key::Int64,
        }),
        other => bail!("{other} cannot be an output"),
    })
}

impl fmt::Display for Feature {
    /// `input_ids: int32 [1, 64]`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let optional = if self.optional { ", optional" } else { "" };
        write!(f, "{}: {}{optional}", self.name, self.ty)
    }
}

impl fmt::Display for FeatureType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FeatureType::Unset | FeatureType::State(None) => f.write_str("no type"),
            FeatureType::Int64 => f.write_str("int64"),
            FeatureType::Double => f.write_str("double"),
            FeatureType::String => f.write_str("string"),
            FeatureType::Image(image) => write!(f, "{image}"),
            FeatureType::Array(array) => write!(f, "{array}"),
            FeatureType::Dictionary(key) => write!(f, "dictionary of {key}"),
            FeatureType::Sequence { element, .. } => write!(f, "sequence of {element}"),
            FeatureType::State(Some(array)) => write!(f, "state {array}"),
        }
    }
}

impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.dtype.map_or("no type", DType::name))?;
        match &self.sizes {
            Sizes::Fixed if self.shape.is_empty() => Ok(()),
            Sizes::Fixed => write!(f, " {}", shape_text(&self.shape)),
            Sizes::OneOf(shapes) => {
                let shapes: Vec<String> = shapes.iter().map(|s| shape_text(s)).collect();
                write!(f, " {}, one of {}", shape_text(&self.shape), shapes.join(" "))
            }
            Sizes::Range(ranges) => write!(f, " {}, default {}", shape_text(ranges), shape_text(&self.shape)),
        }
    }
}

impl fmt::Display for SizeRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match u64::try_from(self.upper) {
            Ok(upper) if upper == self.lower => write!(f, "{upper}"),
            Ok(upper) => write!(f, "{}..{upper}", self.lower),
            Err(_) => write!(f, "{}..", self.lower),
        }
    }
}

impl fmt::Display for Image {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let color = match self.color {
            ColorSpace::Unset => "no colour space",
            ColorSpace::Gray => "gray",
            ColorSpace::Rgb => "RGB",
            ColorSpace::Bgr => "BGR",
            ColorSpace::GrayFloat16 => "fp16 gray",
        };
        write!(f, "image {}×{} {color}", self.width, self.height)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Key::Unset => "no type",
            Key::Int64 => "int64",
            Key::String => "string",
        })
    }
}
