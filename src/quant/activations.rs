//! Activations as 8-bit integers: one pair of `quantize` and `dequantize` in front of each value that layers
//! are given whose scheme wants it, for all of them together.
//!
//! The scale has the least squared error over the magnitudes that a text gave the value.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use rayon::prelude::*;

use super::{calibration::Inputs, fp16};
use crate::{
    bail,
    error::{Context, Result},
    graph::build::spell_constants,
    mil::{Arg, Block, Const, DType, Function, Op, TensorType, Type, ValueId},
};

/// How the inputs of a layer are quantized.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Activations {
    pub bits: u8,
    pub scale: f32,
    /// Signal over error of what the text gave the layer, in decibels.
    pub sqnr_db: f64,
}

/// The largest code, on both sides of zero.
const CODES: f32 = 127.0;

/// What is known of the inputs of weights whose scheme wants activations quantized, or why nothing is.
pub(super) type Asked = BTreeMap<ValueId, Result<Arc<Inputs>, String>>;

/// Scales by where what they were fitted to is, in order; `None` where that is zero.
pub(super) type Fits = BTreeMap<Vec<usize>, Option<Activations>>;

/// The pairs of one function.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    /// By what layers are given.
    scales: BTreeMap<ValueId, Activations>,
    /// By their weights: what layers are given, or why that stays as it is.
    layers: BTreeMap<ValueId, Result<Vec<ValueId>, String>>,
}

impl Pairs {
    /// `fits` keeps what was fitted, for other functions that are given the same.
    pub(super) fn plan(function: &Function, asked: &Asked, fits: &mut Fits) -> Pairs {
        let mut layers: BTreeMap<ValueId, Result<Vec<ValueId>, String>> = BTreeMap::new();
        let mut decoded: HashSet<ValueId> = HashSet::new();
        let mut other: HashMap<ValueId, &str> = HashMap::new();
        function.body.walk(&mut |op| {
            if op.kind == "dequantize" {
                decoded.extend(&op.outputs);
            }
            let weight = layer(op).filter(|w| asked.contains_key(w));
            for arg in op.args() {
                if let Arg::Value(id) = arg {
                    other.entry(*id).or_insert(&op.kind);
                }
            }
            let Some(weight) = weight else { return };
            let known = layers.entry(weight).or_insert(Ok(Vec::new()));
            match given(op) {
                Some(x) if decoded.contains(&x) => *known = Err("they are quantized already".into()),
                Some(x) => {
                    if let Ok(all) = known
                        && !all.contains(&x)
                    {
                        all.push(x);
                    }
                }
                None => *known = Err("the layer is given a constant".into()),
            }
        });
        for (weight, inputs) in asked {
            let kind = other.get(weight).copied().unwrap_or_default();
            let known =
                layers.entry(*weight).or_insert_with(|| Err(format!("`{kind}` is no layer that takes them")));
            if let (Ok(_), Err(why)) = (&known, inputs) {
                *known = Err(why.clone());
            }
        }
        let mut met: BTreeMap<ValueId, Vec<&Arc<Inputs>>> = BTreeMap::new();
        for (weight, values) in &layers {
            let (Ok(values), Some(Ok(inputs))) = (values, asked.get(weight)) else { continue };
            for x in values {
                let known = met.entry(*x).or_default();
                if !known.iter().any(|k| Arc::ptr_eq(k, inputs)) {
                    known.push(inputs);
                }
            }
        }
        let key = |inputs: &[&Arc<Inputs>]| {
            let mut key: Vec<usize> = inputs.iter().map(|i| Arc::as_ptr(i).addr()).collect();
            key.sort_unstable();
            key
        };
        let mut new: BTreeMap<Vec<usize>, &[&Arc<Inputs>]> =
            met.values().map(|inputs| (key(inputs), inputs.as_slice())).collect();
        new.retain(|key, _| !fits.contains_key(key));
        fits.par_extend(new.into_par_iter().map(|(key, inputs)| (key, fit(inputs))));
        let known = |(x, inputs): (&ValueId, &Vec<&Arc<Inputs>>)| Some((*x, (*fits.get(&key(inputs))?)?));
        let scales: BTreeMap<ValueId, Activations> = met.iter().filter_map(known).collect();
        for known in layers.values_mut() {
            if known.as_ref().is_ok_and(|all| !all.iter().all(|x| scales.contains_key(x))) {
                *known = Err("the text gave the layer nothing but zeros".into());
            }
        }
        Pairs { scales, layers }
    }

    /// How the inputs of a weight's layers are quantized, the coarsest where they are several, or why they are
    /// not; `None` where nobody asked.
    pub(super) fn of(&self, weight: ValueId) -> Option<Result<Activations, String>> {
        let values = match self.layers.get(&weight)? {
            Ok(values) => values,
            Err(why) => return Some(Err(why.clone())),
        };
        let all = values.iter().filter_map(|x| self.scales.get(x));
        all.copied().max_by(|a, b| a.scale.total_cmp(&b.scale)).map(Ok)
    }

    /// Puts the pairs into the function.
    pub(super) fn insert(&self, function: &mut Function) -> Result<()> {
        if self.scales.is_empty() {
            return Ok(());
        }
        let mut names: HashSet<String> = function.values.iter().map(|v| v.name.clone()).collect();
        let mut body = std::mem::take(&mut function.body);
        let done = self.insert_into(&mut body, function, &mut names);
        function.body = body;
        done?;
        spell_constants(function);
        Ok(())
    }

    fn insert_into(
        &self,
        block: &mut Block,
        function: &mut Function,
        names: &mut HashSet<String>,
    ) -> Result<()> {
        let mut pairs: HashMap<ValueId, ValueId> = HashMap::new();
        for mut op in std::mem::take(&mut block.ops) {
            for inner in &mut op.blocks {
                self.insert_into(inner, function, names)?;
            }
            let wanted = layer(&op).is_some_and(|w| matches!(self.layers.get(&w), Some(Ok(_))));
            if let (true, Some(x)) = (wanted, given(&op))
                && let Some(how) = self.scales.get(&x)
            {
                let decoded = match pairs.get(&x) {
                    Some(known) => *known,
                    None => {
                        let pair = pair(function, names, x, how.scale).at(op.name())?;
                        let decoded = pair[1].outputs[0];
                        block.ops.extend(pair);
                        pairs.insert(x, decoded);
                        decoded
                    }
                };
                op.params.insert("x".into(), vec![Arg::Value(decoded)]);
            }
            block.ops.push(op);
        }
        Ok(())
    }
}

/// The weight of a layer that can take quantized activations.
fn layer(op: &Op) -> Option<ValueId> {
    match (op.kind.as_str(), op.params.get("weight").map(Vec::as_slice)) {
        ("conv" | "linear", Some([Arg::Value(id)])) => Some(*id),
        _ => None,
    }
}

/// What a layer is given.
fn given(op: &Op) -> Option<ValueId> {
    match op.params.get("x").map(Vec::as_slice) {
        Some([Arg::Value(id)]) => Some(*id),
        _ => None,
    }
}

/// The scale for what several layers are given; `None` where that is zero.
fn fit(inputs: &[&Arc<Inputs>]) -> Option<Activations> {
    let mut all: BTreeMap<u32, u64> = BTreeMap::new();
    for (magnitude, count) in inputs.iter().flat_map(|i| &i.magnitudes) {
        *all.entry(magnitude.to_bits()).or_default() += count;
    }
    #[expect(clippy::cast_precision_loss, reason = "counts, as weights of errors")]
    let counted: Vec<(f32, f64)> = all.iter().map(|(bits, n)| (f32::from_bits(*bits), *n as f64)).collect();
    let largest = counted.last().map(|(v, _)| *v).filter(|v| *v > 0.0)?;
    let error = |scale: f32| -> f64 {
        let off = |(v, n): &(f32, f64)| {
            let near = (v / scale).round_ties_even().min(CODES) * scale;
            n * f64::from(v - near).powi(2)
        };
        counted.iter().map(off).sum()
    };
    // A subnormal scale may count as zero where it is divided by.
    let stored = |scale: f32| fp16::round(scale).clamp(fp16::SMALLEST_NORMAL, 65504.0);
    let mut best = (stored(largest / CODES), f64::INFINITY);
    best.1 = error(best.0);
    // A few outliers may be worth clipping or not: the error has several minima, so first far, then near.
    for (steps, step) in [(0..=80, 0.9f32), (-8..=8, 0.985)] {
        let from = best.0;
        for i in steps {
            let scale = stored(from * step.powi(i));
            let error = error(scale);
            if error < best.1 {
                best = (scale, error);
            }
        }
    }
    let (scale, error) = best;
    let power: f64 = counted.iter().map(|(v, n)| n * f64::from(*v).powi(2)).sum();
    let sqnr_db = if error == 0.0 { f64::INFINITY } else { 10.0 * (power / error).log10() };
    Some(Activations { bits: 8, scale, sqnr_db })
}

/// A value to 8-bit integers and back.
fn pair(function: &mut Function, names: &mut HashSet<String>, x: ValueId, scale: f32) -> Result<[Op; 2]> {
    let Type::Tensor(ty) = function.ty(x).clone() else { bail!("what the layer is given is no tensor") };
    if !matches!(ty.dtype, DType::F16 | DType::F32) {
        bail!("activations of {} have no 8-bit form", ty.dtype);
    }
    let base = function.name(x).to_string();
    let mut made = |kind: &str, what: &str, ty: TensorType, params: Vec<(&str, Arg)>| {
        let base = format!("{base}_{what}");
        let mut name = base.clone();
        let mut n = 0;
        while !names.insert(name.clone()) {
            n += 1;
            name = format!("{base}_{n}");
        }
        let id = function.add(name.clone(), Type::Tensor(ty));
        let attrs = BTreeMap::from([("name".to_string(), Const::string(name))]);
        let params = params.into_iter().map(|(n, a)| (n.to_string(), vec![a])).collect();
        Op { kind: kind.into(), params, outputs: vec![id], attrs, ..Op::default() }
    };
    let factor = || Arg::Const(Const::float(ty.dtype, scale));
    let codes = TensorType { dtype: DType::I8, ..ty.clone() };
    let to = Arg::Const(Const::string(DType::I8.name()));
    let quantize = made(
        "quantize",
        "quantized",
        codes,
        vec![("input", Arg::Value(x)), ("scale", factor()), ("output_dtype", to)],
    );
    let input = Arg::Value(quantize.outputs[0]);
    let dequantize =
        made("dequantize", "dequantized", ty.clone(), vec![("input", input), ("scale", factor())]);
    Ok([quantize, dequantize])
}
