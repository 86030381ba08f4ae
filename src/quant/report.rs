//! What was compressed, how well, and what was left and why.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::json;

use super::{
    activations::Activations,
    calibration::Method,
    cell::{Cell, Quality},
    scheme::Scheme,
};
use crate::error::Result;
use crate::mil::{Arg, Const, Data, Program, TensorType, ValueId, types::shape_text};

/// Of one program; figures that depend on the values are there once the program was written.
#[derive(Debug, Default)]
pub struct Report {
    pub tensors: Vec<Entry>,
    pub skipped: Vec<Skipped>,
    /// Worth knowing.
    pub notes: Vec<String>,
    /// Bytes of all weights before and after; equal ones count once.
    pub before: u64,
    pub after: u64,
    /// Elements of all weights of floats.
    pub elements: u64,
    /// Rules of the policy that fitted a weight.
    pub used: Vec<bool>,
}

/// A weight that was compressed.
#[derive(Debug)]
pub struct Entry {
    pub name: String,
    /// Functions that read it.
    pub functions: Vec<String>,
    pub ty: TensorType,
    /// What reads it.
    pub op: String,
    pub scheme: Scheme,
    /// What is done to what its layers are given, or why that stays as it is; `None` where nothing was asked.
    pub activations: Option<Result<Activations, String>>,
    /// Why the scheme is not the one that was asked for.
    pub note: Option<String>,
    pub bytes: u64,
    pub(super) cell: Cell,
}

/// A constant that stays as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Skipped {
    pub name: String,
    pub ty: String,
    pub elements: u64,
    pub why: String,
}

/// All compressed weights together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Total {
    pub elements: u64,
    pub bits_per_weight: f64,
    /// Signal over error in decibels: of all weights together, and of the worst one.
    pub sqnr_db: f64,
    pub worst_db: f64,
    pub max_error: f64,
}

impl Entry {
    /// How what its layers are given is quantized, where it is.
    pub fn activations(&self) -> Option<Activations> {
        self.activations.as_ref()?.as_ref().ok().copied()
    }

    /// How near the written values are to the original ones, once they are written.
    pub fn quality(&self) -> Option<Quality> {
        self.cell.quality()
    }

    /// How a calibration text helped, or why it did not; `None` where there was none.
    pub fn calibrated(&self) -> Option<Result<Method, &str>> {
        self.cell.method()
    }

    /// The values that will be read, and those that they were made of.
    pub fn values(&self) -> Result<(Vec<f32>, Vec<f32>)> {
        self.cell.decoded()
    }

    pub fn elements(&self) -> u64 {
        self.ty.count().unwrap_or(0) as u64
    }

    pub fn bits_per_weight(&self) -> f64 {
        ratio(self.bytes * 8, self.elements())
    }
}

impl Report {
    /// Bits per weight of the whole program, before and after.
    pub fn bits_per_weight(&self) -> (f64, f64) {
        (ratio(self.before * 8, self.elements), ratio(self.after * 8, self.elements))
    }

    /// `None` where nothing was compressed, or not written yet.
    pub fn total(&self) -> Option<Total> {
        let mut total = Total {
            elements: 0,
            bits_per_weight: 0.0,
            sqnr_db: 0.0,
            worst_db: f64::INFINITY,
            max_error: 0.0,
        };
        let (mut bytes, mut signal, mut error) = (0, 0.0, 0.0);
        // A table and the head that is tied to it are one weight.
        let mut seen = HashSet::new();
        for entry in self.tensors.iter().filter(|e| seen.insert(e.cell.key())) {
            let quality = entry.quality()?;
            total.elements += entry.elements();
            bytes += entry.bytes;
            signal += quality.power;
            error += quality.squared_error;
            total.worst_db = total.worst_db.min(quality.sqnr_db);
            total.max_error = total.max_error.max(quality.max_error);
        }
        total.bits_per_weight = ratio(bytes * 8, total.elements);
        total.sqnr_db = if error == 0.0 { f64::INFINITY } else { 10.0 * (signal / error).log10() };
        (total.elements > 0).then_some(total)
    }

    /// Signal over error of quantized activations, in decibels: by the mean of what each layer is given, and of
    /// the worst one; `None` where none are quantized.
    pub fn activations(&self) -> Option<(f64, f64)> {
        let all: Vec<f64> = self.tensors.iter().filter_map(|e| Some(e.activations()?.sqnr_db)).collect();
        #[expect(clippy::cast_precision_loss, reason = "a number of layers")]
        let noise = all.iter().map(|db| 10f64.powf(-db / 10.0)).sum::<f64>() / all.len().max(1) as f64;
        let worst = all.iter().copied().reduce(f64::min)?;
        Some((-10.0 * noise.log10(), worst))
    }

    /// What the package says about itself, as JSON: schemes, bits and errors of what is compressed.
    pub fn metadata(&self) -> Option<String> {
        let total = self.total()?;
        let mut schemes: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for entry in &self.tensors {
            let sum = schemes.entry(entry.scheme.to_string()).or_default();
            *sum = (sum.0 + 1, sum.1 + entry.elements());
        }
        let each = |(scheme, (tensors, elements)): (&String, &(u64, u64))| {
            (scheme.clone(), json!({"tensors": tensors, "elements": elements}))
        };
        let schemes: serde_json::Map<String, serde_json::Value> = schemes.iter().map(each).collect();
        let mut said = json!({
            "schemes": schemes,
            "bits_per_weight": rounded(self.bits_per_weight().1),
            "sqnr_db": decibels(total.sqnr_db),
            "worst_sqnr_db": decibels(total.worst_db),
        });
        if let Some((mean, worst)) = self.activations() {
            said["activations"] =
                json!({"bits": 8, "sqnr_db": decibels(mean), "worst_sqnr_db": decibels(worst)});
        }
        Some(said.to_string())
    }

    /// The whole report.
    pub fn json(&self) -> serde_json::Value {
        let tensor = |e: &Entry| {
            let quality = e.quality();
            json!({
                "name": e.name, "functions": e.functions, "shape": e.ty.shape(), "dtype": e.ty.dtype.name(),
                "op": e.op, "scheme": e.scheme.to_string(), "note": e.note, "bytes": e.bytes,
                "bits_per_weight": e.bits_per_weight(),
                "activations": e.activations.as_ref().map(|a| match a {
                    Ok(a) => json!({"bits": a.bits, "scale": a.scale, "sqnr_db": decibels(a.sqnr_db)}),
                    Err(why) => json!(format!("no: {why}")),
                }),
                "sqnr_db": quality.map(|q| decibels(q.sqnr_db)),
                "max_error": quality.map(|q| q.max_error),
                "calibrated": e.calibrated().map(|c| c.map_or_else(|why| format!("no: {why}"), |m| m.name().into())),
            })
        };
        let skipped =
            |s: &Skipped| json!({"name": s.name, "type": s.ty, "elements": s.elements, "why": s.why});
        let (before, after) = self.bits_per_weight();
        let total = self.total();
        json!({
            "tensors": self.tensors.iter().map(tensor).collect::<Vec<_>>(),
            "skipped": self.skipped.iter().map(skipped).collect::<Vec<_>>(),
            "notes": self.notes,
            "weight_bytes": {"before": self.before, "after": self.after},
            "bits_per_weight": {"before": before, "after": after},
            "compressed": total.map(|t| json!({
                "elements": t.elements, "bits_per_weight": t.bits_per_weight,
                "sqnr_db": decibels(t.sqnr_db), "worst_sqnr_db": decibels(t.worst_db), "max_error": t.max_error,
            })),
        })
    }
}

/// JSON has no infinity: no error at all is shown as 999 dB.
pub fn decibels(db: f64) -> f64 {
    rounded(db.min(999.0))
}

fn rounded(v: f64) -> f64 {
    (v * 100.0).round() / 100.0
}

#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
fn ratio(a: u64, b: u64) -> f64 {
    if b == 0 { 0.0 } else { a as f64 / b as f64 }
}

/// Bytes of all weights of a program, and elements of those of floats as ops read them; equal ones count
/// once.
pub(super) fn weigh(program: &Program) -> (u64, u64) {
    let (mut bytes, mut elements) = (BTreeMap::new(), BTreeMap::new());
    for function in program.functions.values() {
        // What a value is made from: the weights' keys. What is read by a constexpr op is a piece of one.
        let mut made: HashMap<ValueId, String> = HashMap::new();
        let mut pieces = HashSet::new();
        function.body.walk(&mut |op| {
            let mut key = String::new();
            let mut add = |c: &Const| {
                if let Data::Weight(w) = &c.data {
                    bytes.insert(w.key.clone(), w.dtype.packed_len(w.count()).unwrap_or(0) as u64);
                    key.push_str(&w.key);
                }
            };
            op.attrs.values().for_each(&mut add);
            op.args().for_each(|a| {
                if let Arg::Const(c) = a {
                    add(c);
                }
            });
            if op.kind.starts_with("constexpr_") {
                for arg in op.args() {
                    if let Arg::Value(id) = arg {
                        key.push_str(made.get(id).map_or("", String::as_str));
                        pieces.insert(*id);
                    }
                }
            }
            if !key.is_empty() {
                made.extend(op.outputs.iter().map(|id| (*id, key.clone())));
            }
        });
        let mut ids: Vec<(ValueId, String)> =
            made.into_iter().filter(|(id, _)| !pieces.contains(id)).collect();
        ids.sort();
        for (id, key) in ids {
            if let Some(t) = function.ty(id).as_tensor().filter(|t| t.dtype.is_float()) {
                elements.insert(key, t.count().unwrap_or(0) as u64);
            }
        }
    }
    (bytes.values().sum(), elements.values().sum())
}

pub(super) fn skipped(name: &str, ty: &TensorType, why: impl Into<String>) -> Skipped {
    Skipped {
        name: name.into(),
        ty: format!("{} {}", ty.dtype, shape_text(&ty.dims)),
        elements: ty.count().unwrap_or(0) as u64,
        why: why.into(),
    }
}
