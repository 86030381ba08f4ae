//! `silane validate`: a package's program, interpreted, against an independent reference.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use clap::ValueEnum;
use serde_json::json;

use super::{
    Answer,
    choices::Choices,
    layers::Layers,
    print_json,
    quantize::QUANTIZATION,
    run::{batch_and_tokens, function_name, read_tensors},
    sample,
    session::Model,
    sparsity::Sparsity,
    teacher::{Lesson, Perplexity, examine},
};
use crate::{
    bail,
    checkpoint::{Checkpoint, Task},
    error::{Context, Error, Result},
    interp::{
        Machine, Precision,
        compare::{Comparison, compare, compare_over, divergence, kept_rows, spread, top_k},
    },
    mil::{DType, Function, Program, TensorType, Type},
    ops::Val,
    package::{self, Package},
    reference::{self, Inputs},
    ui,
};

const EXAMPLES: &str = "\
Every output is compared, padding left out, and must agree: within 50 dB for fp16 packages, within 1e-4 \
of the spread for fp32 ones. Language models are given tokens one by one and by prompts, and their greedy \
text must be the reference's, but for tokens that the limit lets change places.

The exit code is 0 for PASS, 1 for FAIL, 2 when there was nothing to judge.

Examples:
  silane validate bert.mlpackage --reference bert/
  silane validate bert.mlpackage --reference outputs.safetensors
  silane validate llama.mlpackage --reference llama/ --prompt 'The capital of Italy is' --tokens 32
  silane validate bert/ --reference outputs.safetensors";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The package to validate, or a folder that holds the parts of a language model; or a checkpoint, to
    /// compare silane's own reference with stored outputs
    package: PathBuf,
    /// The checkpoint that it was made from, or stored inputs and outputs
    #[arg(long, value_name = "CHECKPOINT|FILE.safetensors")]
    reference: String,
    /// How floats are computed
    #[arg(long, value_enum, default_value_t = Precise::Fp16)]
    precision: Precise,
    /// What the model is given, instead of a sample of tokens
    #[arg(long, value_name = "TEXT", help_heading = "Language models")]
    prompt: Option<String>,
    /// How many tokens the prompt is continued with
    #[arg(long, value_name = "N", default_value_t = TOKENS, help_heading = "Language models")]
    tokens: usize,
    /// A text whose perplexity is measured, as far as the context goes; block-sparse prefill is compared with
    /// exact prefill on it
    #[arg(long, value_name = "FILE", help_heading = "Language models")]
    text: Option<PathBuf>,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Precise {
    /// Every result is rounded to its declared type, as a device does
    Fp16,
    /// The same, and subnormals become zero, as some devices have it
    Fp16Flush,
    /// Nothing is rounded: what is left is the program's own error
    Fp32,
}

impl From<Precise> for Precision {
    fn from(p: Precise) -> Precision {
        match p {
            Precise::Fp16 => Precision::Fp16,
            Precise::Fp16Flush => Precision::Fp16Flush,
            Precise::Fp32 => Precision::Fp32,
        }
    }
}

/// What an output may be off by.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Limit {
    /// Decibels, at least: for values that were rounded to fp16.
    Psnr(f64),
    /// The largest difference as a share of the spread, at most.
    Relative(f64),
}

impl Limit {
    /// The error of a value that is just within the limit, as a share of the spread.
    fn share(self) -> f64 {
        match self {
            Limit::Psnr(least) => 10f64.powf(-least / 20.0),
            Limit::Relative(most) => most,
        }
    }
}

/// 50 dB is an error of 0.3 % of the spread: what fp16 leaves of a deep model, and far less than any
/// wrong weight, order or position does.
const HALF: Limit = Limit::Psnr(50.0);
/// What the error of the outputs may be above that of what is quantized: a model of 30 layers was seen to
/// lose 1 dB at 8 bits and 8 dB at 4, and wrong weights, orders and positions cost more.
const DEPTH: f64 = 10.0;
/// fp16 weights, each off by up to 2⁻¹² of itself, computed exactly.
const ROUNDED_WEIGHTS: Limit = Limit::Relative(2e-3);
const EXACT: Limit = Limit::Relative(1e-4);
/// How far a language model's prompt is continued, unless told.
const TOKENS: usize = 16;
/// Two implementations of the same arithmetic in fp32.
const REFERENCE: Limit = Limit::Relative(1e-5);

pub(super) fn run(args: &Args) -> Result<Answer> {
    let tensors = Path::new(&args.reference);
    let stored = tensors.extension().is_some_and(|e| e == "safetensors");
    let report = if args.package.join("config.json").is_file() && !holds_parts(&args.package) {
        if !stored {
            bail!("{}: a checkpoint is validated against stored outputs", args.package.display(); hint: "give a `.safetensors` file to `--reference`");
        }
        checkpoint_against_tensors(&Checkpoint::open_dir(&args.package)?, tensors)?
    } else if let Some(model) = Model::open_causal(&args.package)? {
        match (stored, &args.text) {
            (true, Some(_)) => {
                bail!("`--text` needs a checkpoint to compare with"; hint: "give its folder to `--reference`")
            }
            (true, None) => language(&model, &Lesson::stored(&read_tensors(tensors)?)?, args.precision)?,
            (false, _) => language_against_checkpoint(&model, &Checkpoint::open(&args.reference)?, args)?,
        }
    } else if args.text.is_some() {
        bail!("{}: `--text` is for language models", args.package.display());
    } else if stored {
        against_tensors(&args.package, tensors, args.precision)?
    } else {
        against_checkpoint(&args.package, &Checkpoint::open(&args.reference)?, args.precision)?
    };
    if args.json {
        print_json(&report.json())?;
    } else {
        ui::data(report.text());
    }
    Ok(report.answer())
}

/// Judges what `convert` wrote, by silane's own reference.
pub(super) fn judge(path: &Path, checkpoint: &Checkpoint) -> Result<Report> {
    match Model::open_causal(path)? {
        Some(model) => {
            let lesson = Lesson::computed(checkpoint, &prompt(checkpoint, None)?, TOKENS)?;
            language(&model, &lesson, Precise::Fp16)
        }
        None => against_checkpoint(path, checkpoint, Precise::Fp16),
    }
}

/// How far a package is from a checkpoint, or from stored outputs.
pub(super) fn measure(path: &Path, reference: &str) -> Result<Report> {
    let tensors = Path::new(reference);
    if tensors.extension().is_none_or(|e| e != "safetensors") {
        return judge(path, &Checkpoint::open(reference)?);
    }
    match Model::open_causal(path)? {
        Some(model) => language(&model, &Lesson::stored(&read_tensors(tensors)?)?, Precise::Fp16),
        None => against_tensors(path, tensors, Precise::Fp16),
    }
}

/// The error of each output before and after something was done to a package.
pub(super) fn side_by_side(before: &Report, after: &Report) -> String {
    let decibels = |o: &Output| format!("{:.1}", o.comparison.psnr.min(999.0));
    let share = |o: &Output| format!("{:.2e}", o.comparison.relative());
    let mut rows =
        vec![["output", "PSNR dB before", "after", "max error before", "after"].map(String::from).to_vec()];
    for (b, a) in before.outputs.iter().zip(&after.outputs) {
        rows.push(vec![a.name.clone(), decibels(b), decibels(a), share(b), share(a)]);
    }
    let mut text = ui::table(&rows);
    for (when, report) in [("before", before), ("after", after)] {
        if let Some(greedy) = &report.greedy {
            text.push_str(&format!("\ngreedy text {when}: {}", greedy.short()));
        }
    }
    text
}

/// Whether a folder is one that `convert` wrote parts into.
pub(super) fn holds_parts(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut all| {
        all.any(|e| e.is_ok_and(|e| e.path().extension().is_some_and(|x| x == "mlpackage")))
    })
}

/// Tokens of a text, or a sample of the vocabulary.
fn prompt(checkpoint: &Checkpoint, text: Option<&str>) -> Result<Vec<u32>> {
    match text {
        Some(text) => Ok(checkpoint.tokenizer()?.encode(text)?.ids),
        None => Ok(sample::rounds(checkpoint, 1, 24, false)?.swap_remove(0).input_ids.swap_remove(0)),
    }
}

fn language_against_checkpoint(model: &Model, checkpoint: &Checkpoint, args: &Args) -> Result<Report> {
    if args.text.is_some() && model.is_argmax() {
        bail!("`--text` needs logits, the package gives the likeliest token only"; hint: "convert with `--logits last`");
    }
    let prompt = prompt(checkpoint, args.prompt.as_deref())?;
    let lesson = Lesson::computed(checkpoint, &prompt, args.tokens)?;
    let report = language(model, &lesson, args.precision)?;
    let layers = match lesson.rows.first() {
        Some((ids, _)) if report.answer() == Answer::No => {
            Layers::compare(model, checkpoint, ids, args.precision)?
        }
        _ => None,
    };
    let perplexity =
        args.text.as_ref().map(|file| Perplexity::measure(model, checkpoint, file, args.precision));
    let sparsity = match (&args.text, model.session(args.precision.into())?.is_sparse()) {
        (Some(file), true) => Sparsity::measure(model, checkpoint, file, args.precision)?,
        _ => None,
    };
    Ok(Report { layers, perplexity: perplexity.transpose()?, sparsity, ..report })
}

/// How well a written language model foresees a text, and how well its reference does.
pub(super) fn perplexity(path: &Path, checkpoint: &Checkpoint, text: &Path) -> Result<Perplexity> {
    let Some(model) = Model::open_causal(path)? else {
        bail!("{}: only language models foresee text", path.display(); hint: "leave out `--text`");
    };
    Perplexity::measure(&model, checkpoint, text, Precise::Fp16)
}

fn language(model: &Model, lesson: &Lesson, precision: Precise) -> Result<Report> {
    let quantized = model.packages().iter().filter_map(quantized_db).reduce(f64::min);
    // A language model's cache is fp16 whatever the rest is.
    let half = |f: &Function| f.body.outputs.iter().any(|id| is_half(f.value(*id)));
    let half = model.program().functions.values().any(half);
    let limit = limit(half, precision, quantized);
    let seen = examine(model, lesson, precision, limit.share())?;
    let report = seen.pairs.report(limit)?;
    Ok(Report { choices: seen.choices, greedy: seen.greedy, ..report })
}

/// Signal over error of what is quantized in a package, in decibels, as the package says: of its weights, and
/// of activations where they are quantized too, whose errors add up.
fn quantized_db(package: &Package) -> Option<f64> {
    let said = package.interface.metadata.user_defined.get(QUANTIZATION)?;
    let said = serde_json::from_str::<serde_json::Value>(said).ok()?;
    let weights = said["sqnr_db"].as_f64()?;
    let Some(activations) = said["activations"]["sqnr_db"].as_f64() else { return Some(weights) };
    let noise = |db: f64| 10f64.powf(-db / 10.0);
    Some(-10.0 * (noise(weights) + noise(activations)).log10())
}

/// What values may be off by: computed in fp16, from fp16 weights, or all in fp32; or as much as what is
/// quantized in a package is.
fn limit(half: bool, precision: Precise, quantized: Option<f64>) -> Limit {
    match (quantized.filter(|db| *db < 50.0 + DEPTH), half, precision) {
        (Some(db), ..) => Limit::Psnr(db - DEPTH),
        (None, false, _) => EXACT,
        (None, true, Precise::Fp16 | Precise::Fp16Flush) => HALF,
        (None, true, Precise::Fp32) => ROUNDED_WEIGHTS,
    }
}

fn is_half(v: &crate::mil::Value) -> bool {
    matches!(&v.ty, Type::Tensor(t) if t.dtype == DType::F16)
}

/// How far each output is from the reference.
pub(super) struct Report {
    outputs: Vec<Output>,
    /// What a package chose that gives the likeliest token instead of logits.
    choices: BTreeMap<String, Choices>,
    /// How a language model's own text went.
    greedy: Option<Choices>,
    /// Where a language model that fails leaves its reference.
    layers: Option<Layers>,
    perplexity: Option<Perplexity>,
    /// What block-sparse prefill leaves out; told, and not judged.
    sparsity: Option<Sparsity>,
}

struct Output {
    name: String,
    comparison: Comparison,
    /// Values that are not finite, those at padding included.
    not_finite: usize,
    /// For scores: divergence in nats, and the share of the best 1, 3 and 5 that agree.
    scores: Option<(f64, Vec<(usize, f64)>)>,
    limit: Limit,
}

/// Compares with silane's own reference on inputs made from the checkpoint.
fn against_checkpoint(path: &Path, checkpoint: &Checkpoint, precision: Precise) -> Result<Report> {
    let package = package::open_program(path)?;
    let contract = contract(&package)?;
    let task: Task = contract["task"].as_str().unwrap_or_default().parse()?;
    let name = function_name(&package.program, None)?;
    let function = &package.program.functions[&name];
    let [batch, tokens] = batch_and_tokens(function).at(path.display())?;
    let types = function.inputs.iter().any(|id| function.name(*id) == "token_type_ids");
    let mut runner = Runner::new(&package, &name, precision);
    for inputs in sample::rounds(checkpoint, batch, tokens, types)? {
        let expected = reference::encoder(checkpoint, task, &inputs)?;
        let expected = expected.into_iter().map(|(n, t)| (n, Val::Tensor(t))).collect();
        runner.round(&tensors_of(&inputs)?, &expected)?;
    }
    runner.report()
}

/// Compares with stored outputs on the stored inputs.
fn against_tensors(path: &Path, tensors: &Path, precision: Precise) -> Result<Report> {
    let package = package::open_program(path)?;
    let stored = read_tensors(tensors)?;
    let name = function_name(&package.program, None)?;
    let mut runner = Runner::new(&package, &name, precision);
    runner.round(&stored, &stored)?;
    runner.report()
}

/// Judges the judge: the reference against stored outputs.
fn checkpoint_against_tensors(checkpoint: &Checkpoint, tensors: &Path) -> Result<Report> {
    let stored = read_tensors(tensors)?;
    let inputs = inputs_of(&stored)?;
    let task = checkpoint.task()?;
    let seen: BTreeMap<String, Val> = reference::encoder(checkpoint, task, &inputs)?
        .into_iter()
        .map(|(n, t)| (n, Val::Tensor(t)))
        .collect();
    let mut pairs = Pairs::default();
    pairs.add(&seen, &stored, &stored)?;
    pairs.report(REFERENCE)
}

/// A package's function, and what it gave so far beside what was expected.
struct Runner<'a> {
    machine: Machine<'a>,
    program: &'a Program,
    function: String,
    limit: Limit,
    pairs: Pairs,
}

impl<'a> Runner<'a> {
    fn new(package: &'a Package, function: &str, precision: Precise) -> Self {
        let program = &package.program;
        let half = program.functions[function].values.iter().any(is_half);
        let limit = limit(half, precision, quantized_db(package));
        let machine = Machine::new(program, precision.into());
        Self { machine, program, function: function.into(), limit, pairs: Pairs::default() }
    }

    fn round(&mut self, inputs: &BTreeMap<String, Val>, expected: &BTreeMap<String, Val>) -> Result<()> {
        let function = &self.program.functions[&self.function];
        let mut given = BTreeMap::new();
        for id in function.inputs.iter().filter(|id| function.ty(**id).as_tensor().is_some()) {
            let name = function.name(*id);
            let value = input(inputs, name)?;
            fits(name, &value, function.ty(*id))?;
            given.insert(name.to_string(), value);
        }
        if let Some(types) = inputs.get("token_type_ids")
            && !given.contains_key("token_type_ids")
            && types.to_ints()?.iter().any(|t| *t != 0)
        {
            bail!("the reference has token types, the package takes none"; hint: "convert with `--token-type-ids`");
        }
        let mut states = self.machine.states(&self.function)?;
        let seen = self.machine.run(&self.function, &given, &mut states, None)?;
        self.pairs.add(&seen, expected, inputs)
    }

    fn report(self) -> Result<Report> {
        self.pairs.report(self.limit)
    }
}

/// Refuses an input of another size than the package takes.
fn fits(name: &str, value: &Val, ty: &Type) -> Result<()> {
    let (seen, wanted) = (value.tensor()?.dims(), ty.as_tensor().and_then(TensorType::shape));
    match (seen, wanted) {
        (seen, Some(wanted)) if seen != wanted => {
            let error =
                Error::new(format!("the reference's `{name}` is {seen:?}, the package takes {wanted:?}"));
            Err(match seen {
                [rows, tokens] => {
                    error.hint(format!("convert with `--batch {rows} --sequence-length {tokens}`"))
                }
                _ => error,
            })
        }
        _ => Ok(()),
    }
}

/// A given input; a mask that is not there is all real.
fn input(inputs: &BTreeMap<String, Val>, name: &str) -> Result<Val> {
    match (inputs.get(name), name, inputs.get("input_ids")) {
        (Some(v), _, _) => Ok(v.clone()),
        (None, "attention_mask", Some(ids)) => Ok(Val::Tensor(ids.tensor()?.ones_like()?)),
        (None, "token_type_ids", Some(ids)) => Ok(Val::Tensor(ids.tensor()?.zeros_like()?)),
        _ => bail!("the reference has no input `{name}`"),
    }
}

fn tensors_of(inputs: &Inputs) -> Result<BTreeMap<String, Val>> {
    let tensor = |rows: &[Vec<u32>]| {
        let width = rows.first().map_or(0, Vec::len);
        Val::ints(rows.iter().flatten().map(|i| i64::from(*i)).collect(), &[rows.len(), width])
    };
    let mut all = BTreeMap::from([
        ("input_ids".to_string(), tensor(&inputs.input_ids)?),
        ("attention_mask".to_string(), tensor(&inputs.attention_mask)?),
    ]);
    if let Some(types) = &inputs.token_type_ids {
        all.insert("token_type_ids".into(), tensor(types)?);
    }
    Ok(all)
}

fn inputs_of(tensors: &BTreeMap<String, Val>) -> Result<Inputs> {
    let rows = |v: &Val| -> Result<Vec<Vec<u32>>> {
        let width = v.tensor()?.dims().last().copied().unwrap_or(0).max(1);
        let all = v.to_ints()?;
        let id = |i: &i64| u32::try_from(*i).map_err(|_| Error::new(format!("{i} is no token id")));
        all.chunks(width).map(|row| row.iter().map(id).collect()).collect()
    };
    Ok(Inputs {
        input_ids: rows(&input(tensors, "input_ids")?)?,
        attention_mask: rows(&input(tensors, "attention_mask")?)?,
        token_type_ids: tensors.get("token_type_ids").map(rows).transpose()?,
    })
}

fn contract(package: &Package) -> Result<serde_json::Value> {
    match package.interface.metadata.user_defined.get("silane.contract") {
        Some(text) => serde_json::from_str(text).map_err(|e| Error::new(format!("silane.contract: {e}"))),
        None => {
            bail!("{}: the package says nothing about its task", package.path.display(); hint: "give stored inputs and outputs to `--reference`")
        }
    }
}

/// Seen and expected values of each output, padding left out.
#[derive(Default)]
pub(super) struct Pairs(BTreeMap<String, Pair>);

#[derive(Default)]
struct Pair {
    seen: Vec<f32>,
    expected: Vec<f32>,
    not_finite: usize,
    classes: Option<usize>,
    /// The least logit, where only the largest ones are compared.
    least: Option<f32>,
}

impl Pairs {
    /// Adds one row of scores.
    pub(super) fn push(&mut self, name: &str, seen: &[f32], expected: &[f32]) {
        let pair = self.0.entry(name.into()).or_default();
        pair.not_finite += seen.iter().filter(|v| !v.is_finite()).count();
        pair.seen.extend(seen);
        pair.expected.extend(expected);
        pair.classes = Some(expected.len());
    }

    /// Adds the score of the likeliest token, to be measured by the spread of all logits.
    pub(super) fn push_best(&mut self, name: &str, seen: f32, logits: &[f32]) {
        let pair = self.0.entry(name.into()).or_default();
        pair.not_finite += usize::from(!seen.is_finite());
        pair.seen.push(seen);
        pair.expected.push(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let least = logits.iter().copied().fold(f32::INFINITY, f32::min);
        pair.least = Some(pair.least.map_or(least, |l| l.min(least)));
    }

    fn add(
        &mut self,
        seen: &BTreeMap<String, Val>,
        expected: &BTreeMap<String, Val>,
        inputs: &BTreeMap<String, Val>,
    ) -> Result<()> {
        let mask = input(inputs, "attention_mask")?;
        let (shape, mask) = (mask.tensor()?.dims().to_vec(), mask.to_ints()?);
        for (name, seen) in seen {
            // Sentence-transformers calls it `sentence_embedding`.
            let other = (name == "embedding").then_some("sentence_embedding");
            let stored = expected.get(name).or_else(|| expected.get(other?));
            let Some(expected) = stored else { continue };
            let (dims, want) = (seen.tensor()?.dims(), expected.tensor()?.dims());
            if dims != want {
                bail!("output `{name}` is {dims:?}, {want:?} is expected");
            }
            let (seen_values, expected_values) = (seen.to_floats()?, expected.to_floats()?);
            let rows: Vec<i64> = match dims {
                [b, s, ..] if [*b, *s] == shape[..] => mask.clone(),
                // A row of nothing but padding means nothing.
                _ => mask.chunks(shape[1].max(1)).map(|row| row.iter().sum()).collect(),
            };
            let width = seen_values.len() / rows.len().max(1);
            let pair = self.0.entry(name.clone()).or_default();
            pair.not_finite += seen_values.iter().filter(|v| !v.is_finite()).count();
            pair.seen.extend(kept_rows(&seen_values, &rows, width)?);
            pair.expected.extend(kept_rows(&expected_values, &rows, width)?);
            pair.classes = (name == "logits" && width > 1).then_some(width);
        }
        Ok(())
    }

    fn report(self, limit: Limit) -> Result<Report> {
        if self.0.is_empty() {
            bail!("the reference has none of the package's outputs");
        }
        let tolerance = match limit {
            Limit::Relative(r) => r,
            Limit::Psnr(_) => 1e-2,
        };
        let mut outputs = Vec::new();
        for (name, pair) in self.0 {
            let scores = match pair.classes {
                Some(classes) => {
                    let top = [1, 3, 5].into_iter().filter(|k| *k < classes);
                    let top = top
                        .map(|k| Ok((k, top_k(&pair.seen, &pair.expected, classes, k)?)))
                        .collect::<Result<_>>()?;
                    Some((divergence(&pair.seen, &pair.expected, classes)?, top))
                }
                None => None,
            };
            let comparison = match pair.least {
                Some(least) => {
                    let all: Vec<f32> = pair.expected.iter().copied().chain([least]).collect();
                    compare_over(&pair.seen, &pair.expected, tolerance, spread(&all))?
                }
                None => compare(&pair.seen, &pair.expected, tolerance)?,
            };
            outputs.push(Output { name, comparison, not_finite: pair.not_finite, scores, limit });
        }
        Ok(Report {
            outputs,
            choices: BTreeMap::new(),
            greedy: None,
            layers: None,
            perplexity: None,
            sparsity: None,
        })
    }
}

impl Output {
    fn passes(&self) -> bool {
        let c = &self.comparison;
        let near = match self.limit {
            Limit::Psnr(least) => c.psnr >= least,
            Limit::Relative(most) => c.relative() <= most,
        };
        near && self.not_finite == 0 && c.expected_non_finite == 0
    }

    fn text(&self) -> String {
        let c = &self.comparison;
        let limit = match self.limit {
            Limit::Psnr(least) if least.fract() == 0.0 => format!("at least {least} dB"),
            Limit::Psnr(least) => format!("at least {least:.1} dB, as it is quantized"),
            Limit::Relative(most) => format!("at most {most:e} of the spread"),
        };
        let verdict = if self.passes() { "PASS" } else { "FAIL" };
        let mut text = format!(
            "{verdict} {}: max error {:.2e} ({:.2e} of the spread), cosine {:.7}, PSNR {:.1} dB; wanted {limit}",
            self.name,
            c.max,
            c.relative(),
            c.cosine,
            c.psnr
        );
        if let Some((divergence, top)) = &self.scores {
            let top: Vec<String> =
                top.iter().map(|(k, share)| format!("top-{k} {:.1} %", share * 100.0)).collect();
            text.push_str(&format!("\n     KL divergence {divergence:.2e}, agreement {}", top.join(", ")));
        }
        if self.not_finite > 0 {
            text.push_str(&format!("\n     {} values are not finite", self.not_finite));
        }
        if let (false, Some(bad)) = (self.passes(), &c.first_bad) {
            text.push_str(&format!(
                "\n     first value off: index {}, {} for {}",
                bad.index, bad.seen, bad.expected
            ));
        }
        text
    }
}

impl Report {
    pub(super) fn answer(&self) -> Answer {
        let chosen = self.choices.values().chain(&self.greedy).all(Choices::passes);
        if chosen && self.outputs.iter().all(Output::passes) { Answer::Yes } else { Answer::No }
    }

    /// What the package keeps to itself.
    fn not_compared(&self) -> Option<&'static str> {
        (!self.choices.is_empty()).then_some(
            "logits of tokens that were not chosen: the package gives the likeliest token and its score only",
        )
    }

    pub(super) fn text(&self) -> String {
        let outputs = self.outputs.iter().map(Output::text);
        let text = outputs.chain(self.choices.iter().map(|(name, c)| c.text(name)));
        let text = text.chain(self.greedy.as_ref().map(|c| c.text("greedy text")));
        let text = text.chain(self.not_compared().map(|what| format!("not compared: {what}")));
        let text = text.chain(self.layers.as_ref().map(Layers::text));
        let text = text.chain(self.perplexity.as_ref().map(Perplexity::text));
        text.chain(self.sparsity.as_ref().map(Sparsity::text)).collect::<Vec<_>>().join("\n")
    }

    pub(super) fn json(&self) -> serde_json::Value {
        let output = |o: &Output| {
            let c = &o.comparison;
            json!({
                "name": o.name, "pass": o.passes(), "values": c.count, "max": c.max, "relative": c.relative(),
                "spread": c.spread, "cosine": c.cosine,
                // JSON has no infinity: no difference at all is shown as 999 dB.
                "psnr": c.psnr.min(999.0),
                "not_finite": o.not_finite,
                "kl": o.scores.as_ref().map(|s| s.0),
                "top": o.scores.as_ref().map(|s| s.1.iter().map(|(k, v)| (k.to_string(), *v)).collect::<BTreeMap<_, _>>()),
            })
        };
        json!({
            "pass": self.answer() == Answer::Yes,
            "outputs": self.outputs.iter().map(output).collect::<Vec<_>>(),
            "choices": self.choices.iter().map(|(name, c)| (name.clone(), c.json())).collect::<serde_json::Map<_, _>>(),
            "greedy": self.greedy.as_ref().map(Choices::json),
            "not_compared": self.not_compared(),
            "layers": self.layers.as_ref().map(Layers::json),
            "perplexity": self.perplexity.as_ref().map(Perplexity::json),
            "block_sparse": self.sparsity.as_ref().map(Sparsity::json),
        })
    }
}
