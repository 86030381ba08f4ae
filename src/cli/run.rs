//! `silane run`: tensors in and out, or text in and what the task makes of it out.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::{Answer, generate, session::Model, validate::Precise};
use crate::{
    bail,
    checkpoint::{Encoding, Tokenizer},
    error::{Context, Error, Result, io},
    interp::Machine,
    mil::{DType, Function, Program, TensorType, Type},
    ops::Val,
    package, ui,
};

const EXAMPLES: &str = "\
Examples:
  silane run albert.mlpackage --prompt 'CC(=O)[MASK]c1ccccc1'
  silane run sentences.mlpackage --prompt 'a cat sleeps' --prompt 'a dog barks'
  silane run llama.mlpackage --chat --prompt 'What is the capital of Italy?'
  silane run answers.mlpackage --prompt 'Who wrote it?' --pair 'Ada wrote the first program.'
  silane run bert.mlpackage --inputs inputs.safetensors --outputs outputs.safetensors";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The package to run, or a folder that holds the parts of a language model
    package: PathBuf,
    /// A text to run on, or for a language model to continue; embeddings of several are compared
    #[arg(long = "prompt", visible_alias = "text", value_name = "TEXT", conflicts_with = "inputs")]
    prompts: Vec<String>,
    /// A second text for the pair, such as the passage that answers the question in `--prompt`
    #[arg(long, value_name = "TEXT", requires = "prompts")]
    pair: Option<String>,
    /// Tensors to run on, by the names of the inputs
    #[arg(long, value_name = "FILE.safetensors")]
    inputs: Option<PathBuf>,
    /// Where to write the outputs; without it they are summarised
    #[arg(long, value_name = "FILE.safetensors")]
    outputs: Option<PathBuf>,
    /// The function to run; the default one when left out
    #[arg(long, value_name = "NAME")]
    function: Option<String>,
    /// How floats are computed
    #[arg(long, value_enum, default_value_t = Precise::Fp16)]
    precision: Precise,
    /// The folder with the tokenizer; the one beside the package when left out
    #[arg(long, value_name = "DIR", requires = "prompts")]
    tokenizer: Option<PathBuf>,
    /// How many labels, or candidates for a masked token, to show
    #[arg(long, value_name = "N", default_value_t = 5)]
    top: usize,
    #[command(flatten, next_help_heading = "Language models")]
    sampling: generate::Sampling,
}

pub(super) fn run(args: &Args) -> Result<Answer> {
    if args.prompts.is_empty() && args.inputs.is_none() {
        bail!("there is nothing to run on"; hint: "give a text with `--prompt`, or tensors with `--inputs`");
    }
    if args.inputs.is_none()
        && let Some(model) = Model::open_causal(&args.package)?
    {
        let tokenizer = args.tokenizer.clone().unwrap_or_else(|| model.folder.clone());
        return generate::run(&model, &tokenizer, &args.prompts, args.precision.into(), &args.sampling);
    }
    if args.sampling.chat {
        bail!("{}: `--chat` is for language models", args.package.display());
    }
    let package = package::open_program(&args.package)?;
    let name = function_name(&package.program, args.function.as_deref())?;
    let mut machine = Machine::new(&package.program, args.precision.into());
    let mut states = machine.states(&name)?;
    if args.outputs.is_some() && args.prompts.len() > 1 {
        bail!("{} texts are given, `--outputs` takes the result of one", args.prompts.len());
    }
    if let Some(file) = &args.inputs {
        let inputs = read_tensors(file)?;
        let wanted = &package.program.functions[&name];
        let inputs = inputs
            .into_iter()
            .filter(|(n, _)| wanted.inputs.iter().any(|id| wanted.name(*id) == n))
            .collect();
        let outputs = machine.run(&name, &inputs, &mut states, None)?;
        match &args.outputs {
            Some(file) => write_tensors(file, &package.program, &name, &outputs, args.precision)?,
            None => outputs.iter().try_for_each(|(name, v)| describe(name, v))?,
        }
        return Ok(Answer::Yes);
    }
    let host = Host::new(&package, &name, args)?;
    let mut embeddings = Vec::new();
    for text in &args.prompts {
        let encoding = host.encode(text, args.pair.as_deref())?;
        let outputs = machine.run(&name, &host.inputs(&encoding)?, &mut states, None)?;
        host.show(text, &encoding, &outputs, args.top, &mut embeddings)?;
        if let Some(file) = &args.outputs {
            write_tensors(file, &package.program, &name, &outputs, args.precision)?;
        }
    }
    similarities(&embeddings);
    Ok(Answer::Yes)
}

/// The function asked for, or the one that runs by default.
pub(super) fn function_name(program: &Program, asked: Option<&str>) -> Result<String> {
    let all = || program.functions.keys().map(|n| format!("`{n}`")).collect::<Vec<_>>().join(", ");
    let name = match asked {
        Some(name) => name,
        None if !program.default_function.is_empty() => &program.default_function,
        None if program.functions.contains_key("main") => "main",
        None => bail!("the package has no default function"; hint: "choose one with `--function`: {}", all()),
    };
    if !program.functions.contains_key(name) {
        bail!("the package has no function `{name}`"; hint: "it has {}", all());
    }
    Ok(name.into())
}

/// Rows, and tokens per row, that `input_ids` takes.
pub(super) fn batch_and_tokens(function: &Function) -> Result<[usize; 2]> {
    let input = function.inputs.iter().find(|id| function.name(**id) == "input_ids");
    let ty = input.and_then(|id| function.ty(*id).as_tensor());
    match ty.and_then(TensorType::shape).as_deref() {
        // What a file says is not allocated beyond what any encoder takes.
        Some([batch, tokens]) if batch.saturating_mul(*tokens) <= 1 << 24 => Ok([*batch, *tokens]),
        _ => {
            bail!("the package takes no `input_ids` [batch, tokens] of a fixed size"; hint: "give tensors with `--inputs`")
        }
    }
}

/// What the package's contract and tokenizer know.
struct Host {
    tokenizer: Tokenizer,
    task: String,
    labels: Vec<String>,
    inputs: Vec<String>,
    batch: usize,
    tokens: usize,
}

impl Host {
    fn new(package: &package::Package, function: &str, args: &Args) -> Result<Host> {
        let Some(contract) = package.interface.metadata.user_defined.get("silane.contract") else {
            bail!("{}: the package says nothing about its task", args.package.display(); hint: "give tensors with `--inputs`");
        };
        let contract: serde_json::Value =
            serde_json::from_str(contract).map_err(|e| Error::new(format!("silane.contract: {e}")))?;
        let folder = args.tokenizer.clone().unwrap_or_else(|| args.package.with_extension(""));
        if args.tokenizer.is_none() && !folder.join("tokenizer.json").is_file() {
            bail!("{}: there is no tokenizer beside the package", folder.display(); hint: "say where it is with `--tokenizer DIR`, such as the checkpoint's folder");
        }
        let tokenizer = Tokenizer::open(&folder)?;
        let names = |v: &serde_json::Value| -> Vec<String> {
            v.as_array().into_iter().flatten().filter_map(|n| n.as_str().map(str::to_string)).collect()
        };
        let [batch, tokens] = batch_and_tokens(&package.program.functions[function])?;
        let inputs = contract["functions"]["main"]["inputs"].as_array().into_iter().flatten();
        Ok(Host {
            tokenizer,
            task: contract["task"].as_str().unwrap_or_default().into(),
            labels: names(&contract["labels"]),
            inputs: inputs.filter_map(|i| i["name"].as_str().map(str::to_string)).collect(),
            batch,
            tokens,
        })
    }

    fn encode(&self, text: &str, pair: Option<&str>) -> Result<Encoding> {
        let encoding = match pair {
            Some(pair) => self.tokenizer.encode_pair(text, pair)?,
            None => self.tokenizer.encode(text)?,
        };
        if encoding.ids.len() > self.tokens {
            bail!("the text is {} long, the package takes {}", ui::counted(encoding.ids.len() as u64, "token"), self.tokens; hint: "convert with a longer `--sequence-length`");
        }
        Ok(encoding)
    }

    /// The text in the first row, padding everywhere else.
    fn inputs(&self, encoding: &Encoding) -> Result<BTreeMap<String, Val>> {
        let pad = self.tokenizer.pad_id.unwrap_or(0);
        let mut inputs = BTreeMap::new();
        for (name, row, rest) in [
            ("input_ids", &encoding.ids, pad),
            ("attention_mask", &encoding.attention_mask, 0),
            ("token_type_ids", &encoding.type_ids, 0),
        ] {
            if self.inputs.iter().any(|n| n == name) {
                let mut values: Vec<i64> = row.iter().map(|i| i64::from(*i)).collect();
                values.resize(self.batch * self.tokens, i64::from(rest));
                inputs.insert(name.to_string(), Val::ints(values, &[self.batch, self.tokens])?);
            }
        }
        Ok(inputs)
    }

    fn show(
        &self,
        text: &str,
        encoding: &Encoding,
        outputs: &BTreeMap<String, Val>,
        top: usize,
        embeddings: &mut Vec<(String, Vec<f32>)>,
    ) -> Result<()> {
        let first_row = |name: &str| -> Result<Vec<f32>> {
            let value =
                outputs.get(name).ok_or_else(|| Error::new(format!("there is no output `{name}`")))?;
            let all = value.to_floats()?;
            Ok(all[..all.len() / self.batch.max(1)].to_vec())
        };
        let token = |i: usize| self.tokenizer.token(encoding.ids[i]).unwrap_or_default();
        match self.task.as_str() {
            "embedding" => embeddings.push((text.into(), first_row("embedding")?)),
            "sequence-classification" => {
                let scores = softmax(&first_row("logits")?);
                for (i, p) in best(&scores, top) {
                    ui::data(format_args!("{p:.4}  {}", self.label(i)));
                }
            }
            "token-classification" => {
                let logits = first_row("logits")?;
                let width = logits.len() / self.tokens;
                for i in 0..encoding.ids.len() {
                    let scores = softmax(&logits[i * width..(i + 1) * width]);
                    if let Some((label, p)) = best(&scores, 1).first() {
                        ui::data(format_args!("{p:.4}  {:<16} {}", token(i), self.label(*label)));
                    }
                }
            }
            "question-answering" => {
                let (start, end) = (first_row("start_logits")?, first_row("end_logits")?);
                let last = encoding.ids.len();
                let spans = (0..last).flat_map(|s| (s..last.min(s + 30)).map(move |e| (s, e)));
                let score = |(s, e): (usize, usize)| start[s] + end[e];
                let passage = |i: usize| encoding.type_ids.get(i).is_some_and(|t| *t == 1);
                let span = spans
                    .filter(|(s, e)| passage(*s) && passage(*e))
                    .max_by(|a, b| score(*a).total_cmp(&score(*b)));
                match span {
                    Some((s, e)) => ui::data(self.tokenizer.decode(&encoding.ids[s..=e], true)?),
                    None => bail!("there is no passage to answer from"; hint: "give it with `--pair`"),
                }
            }
            "masked-lm" => {
                let Some(mask) = self.tokenizer.mask_id else { bail!("the tokenizer has no mask token") };
                let logits = first_row("logits")?;
                let width = logits.len() / self.tokens;
                let mut masked = 0;
                for (i, _) in encoding.ids.iter().enumerate().filter(|(_, id)| **id == mask) {
                    masked += 1;
                    let scores = softmax(&logits[i * width..(i + 1) * width]);
                    for (candidate, p) in best(&scores, top) {
                        let id = u32::try_from(candidate).unwrap_or(0);
                        let name = self.tokenizer.token(id).unwrap_or_default();
                        ui::data(format_args!("{p:.4}  {name}"));
                    }
                }
                if masked == 0 {
                    let token = self.tokenizer.token(mask).unwrap_or_default();
                    bail!("no token of the text is masked"; hint: "write `{token}` where one is missing");
                }
            }
            "pre-training" => {
                let logits = first_row("logits")?;
                for (i, logit) in logits.iter().enumerate().take(encoding.ids.len()) {
                    let replaced = 1.0 / (1.0 + (-logit).exp());
                    ui::data(format_args!("{replaced:.4}  {}", token(i)));
                }
            }
            _ => outputs.iter().try_for_each(|(name, v)| describe(name, v))?,
        }
        Ok(())
    }

    fn label(&self, i: usize) -> String {
        self.labels.get(i).cloned().unwrap_or_else(|| format!("LABEL_{i}"))
    }
}

fn softmax(logits: &[f32]) -> Vec<f32> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let powers: Vec<f32> = logits.iter().map(|l| (l - largest).exp()).collect();
    let sum: f32 = powers.iter().sum();
    powers.iter().map(|p| p / sum).collect()
}

fn best(scores: &[f32], top: usize) -> Vec<(usize, f32)> {
    let mut order: Vec<(usize, f32)> = scores.iter().copied().enumerate().collect();
    order.sort_by(|a, b| b.1.total_cmp(&a.1));
    order.truncate(top);
    order
}

/// One vector is printed, several are compared.
fn similarities(embeddings: &[(String, Vec<f32>)]) {
    match embeddings {
        [] => {}
        [(_, vector)] => {
            let text: Vec<String> = vector.iter().map(|v| format!("{v:.5}")).collect();
            ui::data(text.join(" "));
        }
        _ => {
            for (i, (a, x)) in embeddings.iter().enumerate() {
                for (b, y) in &embeddings[i + 1..] {
                    ui::data(format_args!("{:.4}  {a} | {b}", cosine(x, y)));
                }
            }
        }
    }
}

fn cosine(x: &[f32], y: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| -> f32 { a.iter().zip(b).map(|(a, b)| a * b).sum() };
    dot(x, y) / (dot(x, x) * dot(y, y)).sqrt()
}

fn describe(name: &str, value: &Val) -> Result<()> {
    let Val::Tensor(t) = value else {
        ui::data(format_args!("{name}: {value:?}"));
        return Ok(());
    };
    let values = value.to_floats()?;
    let (low, high) =
        values.iter().fold((f32::INFINITY, f32::NEG_INFINITY), |(l, h), v| (l.min(*v), h.max(*v)));
    let bad = values.iter().filter(|v| !v.is_finite()).count();
    ui::data(format_args!("{name} {:?}  min {low:.6}  max {high:.6}  not finite {bad}", t.dims()));
    Ok(())
}

/// Tensors of a safetensors file, by name.
pub(super) fn read_tensors(path: &Path) -> Result<BTreeMap<String, Val>> {
    let bytes = std::fs::read(path).map_err(|e| io(path, &e))?;
    let file = safetensors::SafeTensors::deserialize(&bytes)
        .map_err(|e| Error::new(format!("{}: not a safetensors file: {e}", path.display())))?;
    let mut tensors = BTreeMap::new();
    for (name, view) in file.tensors() {
        let dtype = match view.dtype() {
            safetensors::Dtype::BOOL => DType::Bool,
            safetensors::Dtype::U8 => DType::U8,
            safetensors::Dtype::I8 => DType::I8,
            safetensors::Dtype::I16 => DType::I16,
            safetensors::Dtype::U16 => DType::U16,
            safetensors::Dtype::F16 => DType::F16,
            safetensors::Dtype::BF16 => DType::BF16,
            safetensors::Dtype::I32 => DType::I32,
            safetensors::Dtype::U32 => DType::U32,
            safetensors::Dtype::F32 => DType::F32,
            safetensors::Dtype::I64 => DType::I64,
            safetensors::Dtype::F64 => DType::F64,
            other => bail!("{}: `{name}` is {other:?}, which is no input", path.display()),
        };
        let count = view.shape().iter().product();
        let numbers = crate::mil::Numbers::decode(dtype, view.data(), count).at(&name)?;
        tensors.insert(name, Val::numbers(numbers, view.shape())?);
    }
    Ok(tensors)
}

/// Writes outputs in their declared types; in fp32, floats as they were computed.
fn write_tensors(
    path: &Path,
    program: &Program,
    function: &str,
    outputs: &BTreeMap<String, Val>,
    precision: Precise,
) -> Result<()> {
    let function = &program.functions[function];
    let declared = |name: &str| -> Option<DType> {
        let id = function.body.outputs.iter().find(|id| function.name(**id) == name)?;
        match function.ty(*id) {
            Type::Tensor(t) => Some(t.dtype),
            _ => None,
        }
    };
    let mut data = Vec::new();
    for (name, value) in outputs {
        let Val::Tensor(tensor) = value else { bail!("output `{name}` is no tensor") };
        let dtype = declared(name).unwrap_or(DType::F32);
        let (kind, bytes) = match dtype {
            DType::F16 if precision != Precise::Fp32 => {
                (safetensors::Dtype::F16, half_bytes(&value.to_floats()?))
            }
            d if d.is_float() => {
                let bytes = value.to_floats()?.iter().flat_map(|v| v.to_le_bytes()).collect();
                (safetensors::Dtype::F32, bytes)
            }
            DType::Bool => {
                (safetensors::Dtype::BOOL, value.to_ints()?.iter().map(|i| u8::from(*i != 0)).collect())
            }
            _ => {
                let narrow = |i: &i64| i32::try_from(*i).unwrap_or(i32::MAX).to_le_bytes();
                (safetensors::Dtype::I32, value.to_ints()?.iter().flat_map(narrow).collect::<Vec<u8>>())
            }
        };
        data.push((name.clone(), kind, tensor.dims().to_vec(), bytes));
    }
    let mut views = Vec::new();
    for (name, kind, shape, bytes) in &data {
        let view = safetensors::tensor::TensorView::new(*kind, shape.clone(), bytes)
            .map_err(|e| Error::new(format!("output `{name}`: {e}")))?;
        views.push((name.as_str(), view));
    }
    let bytes = safetensors::serialize(views, None).map_err(|e| Error::new(e.to_string()))?;
    super::write_beside(path, &bytes)
}

/// Infinities stay what they are: the file shows what was computed.
fn half_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| half::f16::from_f32(*v).to_le_bytes()).collect()
}
