//! What `convert --quantize` and `quantize` share: schemes and recipes from the command line, and reports
//! as text.

use std::{collections::BTreeMap, path::Path};

use crate::{
    bail,
    error::{Context, Result, io},
    ops::Opset,
    quant::{Options, Policy, Report, Scheme, Target},
    ui,
};

/// The heading of these options.
pub(super) const HEADING: &str = "Quantization";

/// How weights are compressed, beside the scheme.
#[derive(clap::Args)]
pub(super) struct How {
    /// What the package is to run well on: ane, gpu or all
    #[arg(long, value_name = "TARGET", default_value_t = Target::Ane)]
    pub(super) target: Target,
    /// Take schemes that are known to run badly on the target
    #[arg(long, help_heading = HEADING)]
    pub(super) allow_slow: bool,
}

impl How {
    pub(super) fn options(&self) -> Options {
        Options { target: self.target, allow_slow: self.allow_slow, ..Options::default() }
    }
}

/// A scheme such as `lut4:g16`, or a recipe's file; what is good on the target when left out.
pub(super) fn policy(text: Option<&str>, target: Target, opset: Opset) -> Result<Policy> {
    let Some(text) = text else { return Ok(Policy::uniform(target.default_scheme(opset)?)) };
    if Path::new(text).extension().is_some_and(|e| e == "toml") {
        let recipe = std::fs::read_to_string(text).map_err(|e| io(Path::new(text), &e))?;
        return Policy::parse(&recipe).at(text);
    }
    if text.starts_with("w8a8") {
        bail!("`{text}`: weights alone are quantized, activations stay fp16"; hint: "`int8` compresses the weights");
    }
    Ok(Policy::uniform(text.parse::<Scheme>().hint(|| "or a recipe's file, `NAME.toml`".into())?))
}

/// One row a compressed weight.
pub(super) fn table(reports: &[(String, &Report)]) -> String {
    let head = ["weight", "shape", "scheme", "bits/weight", "SQNR dB", "max error", ""].map(String::from);
    let mut rows = vec![head.to_vec()];
    for (stem, report) in reports {
        for e in &report.tensors {
            let quality = e.quality();
            let name = if stem.is_empty() { e.name.clone() } else { format!("{stem}: {}", e.name) };
            rows.push(vec![
                name,
                crate::mil::types::shape_text(&e.ty.dims),
                e.scheme.to_string(),
                format!("{:.2}", e.bits_per_weight()),
                quality.map_or("-".into(), |q| decibels(q.sqnr_db)),
                quality.map_or("-".into(), |q| format!("{:.2e}", q.max_error)),
                e.note.clone().unwrap_or_default(),
            ]);
        }
    }
    ui::table(&rows)
}

fn decibels(db: f64) -> String {
    if db.is_finite() { format!("{db:.1}") } else { "exact".into() }
}

/// A few lines about all of it.
pub(super) fn summary(reports: &[(String, &Report)]) -> String {
    let mut lines = Vec::new();
    for (stem, report) in reports {
        let place = if stem.is_empty() { String::new() } else { format!("{stem}: ") };
        match report.total() {
            Some(t) => {
                let worst =
                    report.tensors.iter().filter(|e| e.quality().is_some_and(|q| q.sqnr_db == t.worst_db));
                let worst = worst.map(|e| format!(" (`{}`)", e.name)).next().unwrap_or_default();
                lines.push(format!(
                    "  {place}quantized {}, {} elements, to {:.2} bits; SQNR {} dB, at worst {}{worst}",
                    ui::counted(report.tensors.len() as u64, "weight"),
                    ui::count(t.elements),
                    t.bits_per_weight,
                    decibels(t.sqnr_db),
                    decibels(t.worst_db),
                ));
            }
            None => lines
                .push(format!("  {place}{} to quantize", ui::counted(report.tensors.len() as u64, "weight"))),
        }
        lines.extend(left(report).map(|l| format!("  {place}{l}")));
        let (before, after) = report.bits_per_weight();
        lines.push(format!(
            "  {place}weights {} → {}, {before:.2} → {after:.2} bits each",
            ui::bytes(report.before),
            ui::bytes(report.after)
        ));
    }
    lines.join("\n")
}

/// What stays as it is, by reason.
pub(super) fn left(report: &Report) -> Option<String> {
    let mut reasons: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for s in &report.skipped {
        let sum = reasons.entry(s.why.as_str()).or_default();
        *sum = (sum.0 + 1, sum.1 + s.elements);
    }
    let mut reasons: Vec<(&str, (u64, u64))> = reasons.into_iter().collect();
    reasons.sort_by(|a, b| b.1.1.cmp(&a.1.1).then(a.0.cmp(b.0)));
    let each = |(why, (n, elements)): &(&str, (u64, u64))| {
        format!("{} of {} elements: {why}", ui::counted(*n, "constant"), ui::count(*elements))
    };
    let text: Vec<String> = reasons.iter().map(each).collect();
    (!text.is_empty()).then(|| format!("left as they are:\n    {}", text.join("\n    ")))
}
