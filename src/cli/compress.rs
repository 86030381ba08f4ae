//! What `convert --quantize` and `quantize` share: schemes and recipes from the command line, and reports
//! as text.

use std::{collections::BTreeMap, path::Path, sync::Arc};

use serde_json::json;

use crate::{
    error::{Context, Error, Result, io},
    mil::Program,
    models::Rotated,
    ops::Opset,
    quant::{
        self, Activations, Allocation, Calibration, Choices, Entry, Options, Policy, Report, Scheme, Skipped,
        Smoothed, Smoothing, Target,
    },
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
    Ok(Policy::uniform(text.parse::<Scheme>().hint(|| "or a recipe's file, `NAME.toml`".into())?))
}

/// What the weights of programs may become for a budget.
pub(super) fn choices(
    programs: &[&Program],
    opset: Opset,
    smallest: usize,
    options: Options,
    calibration: Option<&Arc<Calibration>>,
) -> Result<Choices> {
    let candidates = options.target.welcome(quant::candidates(opset)?);
    let choices = Choices::measure(programs, &candidates, smallest, options, calibration)?;
    if choices.is_empty() {
        return Err(nothing([left(&choices.skipped)]));
    }
    Ok(choices)
}

/// What a budget came to.
pub(super) fn chosen(allocation: &Allocation) -> String {
    let by = allocation.measured.map_or("by the errors of weights alone".into(), |nats| {
        format!("predictions diverge by {nats:.4} nats a token")
    });
    format!(
        "  chose schemes for {:.3} bits a weight, {}; {by}",
        allocation.bits_per_weight,
        ui::bytes(allocation.bytes)
    )
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
                e.activations.as_ref().map(activations).or(e.note.clone()).unwrap_or_default(),
            ]);
        }
    }
    ui::table(&rows)
}

fn activations(a: &Result<Activations, String>) -> String {
    match a {
        Ok(a) => {
            format!("activations of {} bits, scale {:.2e}, SQNR {} dB", a.bits, a.scale, decibels(a.sqnr_db))
        }
        Err(why) => format!("activations stay: {why}"),
    }
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
        lines.extend(met(report).map(|l| format!("  {place}{l}")));
        lines.extend(left(&report.skipped).map(|l| format!("  {place}{l}")));
        let (before, after) = report.bits_per_weight();
        lines.push(format!(
            "  {place}weights {} → {}, {before:.2} → {after:.2} bits each",
            ui::bytes(report.before),
            ui::bytes(report.after)
        ));
    }
    lines.join("\n")
}

/// What was done to activations, and where that could not be done, the reasons.
fn met(report: &Report) -> Option<String> {
    let asked: Vec<(&Entry, &Result<Activations, String>)> =
        report.tensors.iter().filter_map(|e| Some((e, e.activations.as_ref()?))).collect();
    let done = || asked.iter().filter_map(|(e, a)| Some((e, a.as_ref().ok()?)));
    let mut text = match report.activations() {
        Some((mean, worst)) => {
            let name = done().find(|(_, a)| a.sqnr_db == worst).map_or("", |(e, _)| &e.name);
            let n = ui::counted(done().count() as u64, "weight");
            let [mean, worst] = [mean, worst].map(decibels);
            format!("activations before {n} in 8 bits; SQNR {mean} dB, at worst {worst} (`{name}`)")
        }
        None if asked.is_empty() => return None,
        None => "activations before no weight in 8 bits".into(),
    };
    for (e, a) in asked {
        if let Err(why) = a {
            text.push_str(&format!("\n    not before `{}`: {why}", e.name));
        }
    }
    Some(text)
}

/// What was rotated, and what could not be.
pub(super) fn rotation(rotated: &Rotated) -> String {
    let weights = ui::counted(rotated.weights as u64, "weight");
    match rotated.left {
        None => format!("  rotated the residual stream and values: {weights}"),
        Some(why) => {
            format!("  rotated embedding, head and values: {weights}\n    not the residual stream: {why}")
        }
    }
}

pub(super) fn rotation_json(rotated: &Rotated) -> serde_json::Value {
    json!({ "weights": rotated.weights, "residual_stream": rotated.left.is_none(), "left": rotated.left })
}

/// What smoothing moved, and by reason where it did not.
pub(super) fn smoothing(alpha: f32, smoothing: &Smoothing) -> String {
    let count = |product| smoothing.smoothed.iter().filter(|s| s.product == product).count() as u64;
    let norms = ui::counted(count(false), "norm");
    let products = match count(true) {
        0 => String::new(),
        n => format!(" and {}", ui::counted(n, "product")),
    };
    let layers: usize = smoothing.smoothed.iter().map(|s| s.layers).sum();
    let layers = ui::counted(layers as u64, "weight");
    let mut text = format!("  smoothed {norms}{products} before {layers}, by {alpha}");
    if !smoothing.smoothed.is_empty() {
        let least = smoothing.smoothed.iter().map(|s| s.least).fold(f32::INFINITY, f32::min);
        let largest = smoothing.smoothed.iter().map(|s| s.largest).fold(0.0, f32::max);
        text.push_str(&format!("; channels are divided by {least} to {largest}"));
    }
    let mut reasons: BTreeMap<&str, u64> = BTreeMap::new();
    smoothing.left.values().for_each(|why| *reasons.entry(why).or_default() += 1);
    for (why, n) in reasons {
        text.push_str(&format!("\n    not in {}: {why}", ui::counted(n, "place")));
    }
    text
}

pub(super) fn smoothing_json(alpha: f32, smoothing: &Smoothing) -> serde_json::Value {
    let one = |s: &Smoothed| {
        let of = if s.product { "product" } else { "norm" };
        json!({of: s.name, "weights": s.layers, "least": s.least, "largest": s.largest})
    };
    json!({
        "alpha": (f64::from(alpha) * 1e6).round() / 1e6,
        "smoothed": smoothing.smoothed.iter().map(one).collect::<Vec<_>>(),
        "left": smoothing.left,
    })
}

/// That nothing was compressed, and what stays as it is.
pub(super) fn nothing(left: impl IntoIterator<Item = Option<String>>) -> Error {
    let mut hint =
        "`silane quantize` takes small ones with `--smallest N`, compressed ones with `--recompress`"
            .to_string();
    left.into_iter().flatten().for_each(|left| hint.push_str(&format!("\n  {left}")));
    Error::new("there is no weight to quantize").hint(hint)
}

/// What stays as it is, by reason.
pub(super) fn left(skipped: &[Skipped]) -> Option<String> {
    let mut reasons: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for s in skipped {
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
