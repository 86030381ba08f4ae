//! `silane convert`: checkpoint → models → passes → check → package.

use std::{
    collections::BTreeMap,
    io::Read,
    path::{Path, PathBuf},
    time::Instant,
};

use clap::ValueEnum;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::{
    Answer,
    attention::Asked,
    calibrate::Calibrating,
    compress::{self, How},
    print_json,
    quantize::QUANTIZATION,
    replace_folder, validate,
};
use crate::{
    bail,
    checkpoint::{Checkpoint, Task, tokenizer_files},
    error::{Context, Result, io},
    graph::{self, Checked},
    mil::{DType, Program},
    models::{self, Chunks, Mixture, Part, Parts, Plan},
    nn::cache::Update,
    ops::Opset,
    package::{self, Interface, Save},
    passes,
    quant::{self, Report, Target},
    ui,
};

const EXAMPLES: &str = "\
Examples:
  silane convert bert/ -o bert.mlpackage --validate
  silane convert org/sentences -o sentences.mlpackage --sequence-length 256 --batch 8
  silane convert llama/ -o llama.mlpackage --context-length 1024 --prefill-chunk 128 --validate
  silane convert large/ -o large --max-part-size 500MB
  silane convert llama/ -o llama --quantize lut4:g16 --rotate --calibrate text.txt --gptq
  silane convert llama/ -o llama --quantize w8a8 --calibrate text.txt --smooth 0.5
  silane convert llama/ -o llama --budget 4.5bpw --calibrate text.txt --write-recipe recipe.toml
  silane convert bert/ --dry-run --json";

const ENCODERS: &str = "Encoders";
const DECODERS: &str = "Language models";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// A checkpoint's folder, or the id of one in the Hugging Face cache
    #[arg(required_unless_present = "list")]
    checkpoint: Option<String>,
    /// The package to write, `NAME.mlpackage`; tokenizer and config go beside it, into `NAME/`. A language
    /// model in several parts goes into the folder `NAME`
    #[arg(short, long, value_name = "OUT", required_unless_present_any = ["list", "dry_run"])]
    output: Option<PathBuf>,
    /// What the package computes, such as `embedding` or `causal-lm`; the checkpoint's own task when left out
    #[arg(long)]
    task: Option<Task>,
    /// Tokens per row; as many as the checkpoint has positions for, at most 128, when left out
    #[arg(long, value_name = "N", help_heading = ENCODERS)]
    sequence_length: Option<usize>,
    /// Rows per prediction
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = ENCODERS)]
    batch: usize,
    /// Take the segment of each token as an input; without it all are of segment 0
    #[arg(long, help_heading = ENCODERS)]
    token_type_ids: bool,
    /// Tokens that the cache holds; as many as the checkpoint was made for, at most 2048, when left out.
    /// Several, `512,2048`, make functions for each
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = DECODERS)]
    context_length: Vec<usize>,
    /// Tokens of a prefill call, no more than the context; `off` leaves only `decode`
    #[arg(long, value_name = "N|off", default_value = "256", value_parser = chunk, help_heading = DECODERS)]
    prefill_chunk: Chunk,
    /// How prefill attends to the cache: `auto`, `dense`, `tiled[:tile=512,group=2,filled=yes]` or
    /// `block-sparse[:budget=16,block=128,sinks=2,window=4,alpha=0,dense-layers=4,…]`; `auto` is `tiled`
    /// for chunks over 64 tokens
    #[arg(long, value_name = "FORM", default_value = "auto", help_heading = DECODERS)]
    attention: Asked,
    /// Make a prefill function for each of so many tokens of context, over the same weights and cache
    #[arg(long, value_name = "N", value_delimiter = ',', help_heading = DECODERS)]
    buckets: Vec<usize>,
    /// Ops that a function may have: its tiles take more heads at once until it has no more
    #[arg(long, value_name = "N", default_value_t = models::decoder::MAX_OPS, help_heading = DECODERS)]
    max_ops: usize,
    /// What comes out
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = Logits::Last, help_heading = DECODERS)]
    logits: Logits,
    /// Whether logits of a vocabulary above 16384 tokens, computed in pieces, are joined in the package
    #[arg(long, value_name = "HOW", value_enum, default_value_t = HeadOutputs::Joined, help_heading = DECODERS)]
    head_outputs: HeadOutputs,
    /// How the cache takes new keys and values
    #[arg(long, value_name = "HOW", value_enum, default_value_t = CacheUpdate::Slice, help_heading = DECODERS)]
    cache_update: CacheUpdate,
    /// Cut the model into so many packages
    #[arg(long, value_name = "N", conflicts_with = "max_part_size", help_heading = DECODERS)]
    parts: Option<usize>,
    /// Cut the model so that no package's weights are larger
    #[arg(long, value_name = "SIZE", default_value = "950MB", value_parser = byte_size, help_heading = DECODERS)]
    max_part_size: u64,
    /// Element type of weights and activations
    #[arg(long, value_enum, default_value_t = Float::Fp16)]
    precision: Float,
    /// Compress the weights; `silane quantize --help` says how
    #[arg(long, value_name = "SCHEME|RECIPE.toml", help_heading = compress::HEADING)]
    quantize: Option<String>,
    /// Rotate a language model's activations by an orthogonal matrix that is folded into its weights: it computes
    /// the same, and rounding weights loses less
    #[arg(long, help_heading = compress::HEADING)]
    rotate: bool,
    #[command(flatten)]
    how: How,
    #[command(flatten)]
    calibrating: Calibrating,
    /// The oldest system that has to run the package
    #[arg(long, value_name = "OS", value_enum, default_value_t = MinimumOs::Ios18)]
    minimum_os: MinimumOs,
    /// Read the checkpoint as another model type
    #[arg(long = "as", value_name = "TYPE")]
    model_type: Option<String>,
    /// Replace an output that exists
    #[arg(long)]
    force: bool,
    /// Do everything but write
    #[arg(long)]
    dry_run: bool,
    /// Do not copy tokenizer and config
    #[arg(long)]
    no_tokenizer: bool,
    /// Validate the written package against the checkpoint; exits with 1 where they differ
    #[arg(long)]
    validate: bool,
    /// Print the summary as JSON
    #[arg(long)]
    json: bool,
    /// List the supported model types
    #[arg(long)]
    list: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Float {
    Fp16,
    Fp32,
}

#[derive(Clone, Copy, ValueEnum)]
pub(super) enum MinimumOs {
    /// iOS 16, macOS 13
    Ios16,
    /// iOS 17, macOS 14
    Ios17,
    /// iOS 18, macOS 15
    Ios18,
    /// iOS 26, macOS 26
    Ios26,
}

impl MinimumOs {
    pub(super) fn opset(self) -> Opset {
        match self {
            MinimumOs::Ios16 => Opset::Ios16,
            MinimumOs::Ios17 => Opset::Ios17,
            MinimumOs::Ios18 => Opset::Ios18,
            MinimumOs::Ios26 => Opset::Ios26,
        }
    }
}

#[derive(Clone, Copy, ValueEnum)]
enum Logits {
    /// Logits of a call's last token
    Last,
    /// Logits of each of a call's tokens
    All,
    /// The likeliest next token and its logit, `token_ids` and `token_scores`
    Argmax,
}

#[derive(Clone, Copy, ValueEnum)]
enum HeadOutputs {
    /// One output, `logits`
    Joined,
    /// An output a piece, `logits_1of3` and so on, which the host joins
    Split,
}

#[derive(Clone, Copy, ValueEnum)]
enum CacheUpdate {
    /// `slice_update` of the state in place
    Slice,
    /// Every slot is blended with a one-hot mask
    Mask,
}

/// Tokens of a prefill call, if there is one.
#[derive(Clone, Copy)]
struct Chunk(Option<usize>);

fn chunk(text: &str) -> std::result::Result<Chunk, String> {
    match text {
        "off" => Ok(Chunk(None)),
        _ => {
            text.parse().map(|n| Chunk(Some(n))).map_err(|_| "a number of tokens or `off` is expected".into())
        }
    }
}

/// `950MB`, `1.5GB`, `4096`
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a size that a person typed")]
pub(super) fn byte_size(text: &str) -> std::result::Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "k" | "kb" => 1e3,
        "m" | "mb" => 1e6,
        "g" | "gb" => 1e9,
        unit => return Err(format!("`{unit}` is no unit; kB, MB and GB are")),
    };
    match digits.parse::<f64>() {
        Ok(n) if n > 0.0 => Ok((n * factor) as u64),
        _ => Err("a size such as `950MB` is expected".into()),
    }
}

pub(super) fn run(args: &Args) -> Result<Answer> {
    if args.list {
        models::model_types().for_each(ui::data);
        return Ok(Answer::Yes);
    }
    let start = Instant::now();
    let name = args.checkpoint.as_deref().unwrap_or_default();
    let output = args.output.clone();
    if let Some(output) = &output {
        refuse_extension(output)?;
        refuse_place(&with_extension(output.clone()), args.force)?;
    }
    let checkpoint = Checkpoint::open(name)?;
    checkpoint.notes.iter().for_each(ui::note);
    let model_type = args.model_type.as_deref().map_or_else(|| checkpoint.config.model_type(), Ok)?;
    let plan = plan(args, &checkpoint)?;
    let mut policy = args
        .quantize
        .as_deref()
        .map(|text| compress::policy(Some(text), args.how.target, plan.opset))
        .transpose()?;
    let quantized = policy.is_some() || args.calibrating.budget().is_some();
    if args.calibrating.asked() && !quantized && args.calibrating.smooth().is_none() {
        bail!("a calibration text is given and nothing is quantized"; hint: "`--quantize SCHEME` or `--budget BITS`");
    }
    policy.as_ref().map_or(Ok(()), |p| p.refuse_untaught(args.calibrating.asked()))?;
    let rotated = if args.rotate { Some(models::rotated(&checkpoint, model_type)?) } else { None };
    // What the package must agree with stays the checkpoint as it is.
    let source = rotated.as_ref().map_or(&checkpoint, |r| &r.checkpoint);
    let mut parts = models::build(source, &plan, model_type)?;
    let several = parts.len() > 1;
    let output = output.map(|o| if several { folder(o) } else { Ok(with_extension(o)) }).transpose()?;
    if let Some(output) = &output {
        refuse_place(output, args.force)?;
        refuse_input(output, &checkpoint)?;
        if several && output.exists() && !validate::holds_parts(output) {
            bail!("{}: exists already and holds no packages, so it is not replaced", output.display(); hint: "choose another name, or remove it yourself");
        }
    }
    // What takes time comes after all that can be refused at once.
    let mut lessons = args.calibrating.open(source, &kept_in(output.as_deref().filter(|_| !args.dry_run)))?;
    let mixture = Mixture::of(&checkpoint, model_type)?;
    for part in &mut parts {
        part.notes.iter().for_each(ui::note);
        passes::tidy(&mut part.program)?;
    }
    let smoothing = match (&lessons, args.calibrating.smooth()) {
        (Some(lessons), Some(alpha)) => {
            let mut programs: Vec<&mut Program> = parts.iter_mut().map(|p| &mut p.program).collect();
            Some((alpha, quant::smooth(&mut programs, &lessons.largest()?, alpha)?))
        }
        _ => None,
    };
    let divisors = smoothing.as_ref().map(|(_, s)| s.divisors.clone()).unwrap_or_default();
    let calibration = match &mut lessons {
        Some(lessons) if quantized => Some(args.calibrating.learn(lessons, &divisors, plan.opset)?),
        _ => None,
    };
    // Weights are read through the checkpoint, which refuses what is no number.
    let options = quant::Options { trusted: true, ..args.how.options() };
    let programs: Vec<&Program> = parts.iter().map(|p| &p.program).collect();
    let learnt = lessons.as_mut().zip(calibration.as_ref());
    policy = args.calibrating.choose(learnt, &programs, plan.opset, options, &divisors)?.or(policy);
    drop(lessons);
    args.calibrating.write_recipe(policy.as_ref())?;
    let mut ready = Vec::new();
    let mut summary = json!(null);
    for mut part in parts {
        let compress = |policy| {
            quant::apply_calibrated(&mut part.program, policy, options, calibration.as_ref()).at(&part.stem)
        };
        let report = policy.as_ref().map(compress).transpose()?;
        let Part { stem, program, docs, contract, .. } = part;
        let checked = graph::check(program)?;
        graph::problems(checked.program()).iter().for_each(ui::note);
        let interface = interface(&checked, docs, &contract, &checkpoint)?;
        if summary.is_null() {
            summary = start_summary(&plan, model_type, &contract);
            summary["experts"] = json!(mixture.map(|m| m.json()));
        }
        count_ops(&mut summary, &checked, &stem, several);
        ready.push(Ready { stem, checked, interface, report });
    }
    let reports: Vec<(String, &Report)> = ready
        .iter()
        .filter_map(|r| Some((if several { r.stem.clone() } else { String::new() }, r.report.as_ref()?)))
        .collect();
    if let Some(policy) = &policy {
        policy.refuse_unused(reports.iter().map(|(_, r)| r.used.as_slice()))?;
    }
    let mut notes: Vec<&String> = reports.iter().flat_map(|(_, r)| &r.notes).collect();
    notes.dedup();
    notes.iter().for_each(ui::note);
    if let (Some(output), false) = (&output, args.dry_run) {
        let (model, weights) = write(output, &ready, several, args.force)?;
        if !args.no_tokenizer
            && let Some(folder) = copy_beside(&checkpoint.dir, output, args.force)?
        {
            summary["tokenizer"] = json!(folder.display().to_string());
        }
        summary["bytes"] = json!(model + weights);
        summary["weight_bytes"] = json!(weights);
        summary["output"] = json!(output.display().to_string());
    }
    if !reports.is_empty() {
        let each = reports.iter().map(|(stem, r)| (stem.clone(), r.json()));
        summary["quantization"] = match (several, reports.as_slice()) {
            (false, [(_, report)]) => report.json(),
            _ => json!(each.collect::<BTreeMap<_, _>>()),
        };
    }
    if let Some(rotated) = &rotated {
        summary["rotation"] = compress::rotation_json(rotated);
    }
    if let Some((alpha, smoothing)) = &smoothing {
        summary["smoothing"] = compress::smoothing_json(*alpha, smoothing);
    }
    summary["seconds"] = json!(start.elapsed().as_secs_f64());
    if !args.json {
        ui::talk(tell(&summary));
        if let Some(rotated) = &rotated {
            ui::talk(compress::rotation(rotated));
        }
        if let Some((alpha, smoothing)) = &smoothing {
            ui::talk(compress::smoothing(*alpha, smoothing));
        }
        if !reports.is_empty() {
            ui::talk(compress::summary(&reports));
        }
    }
    let answer = match (&output, args.validate && !args.dry_run) {
        (Some(output), true) => {
            let report = validate::judge(output, &checkpoint)?;
            if !args.json {
                ui::talk(report.text());
            }
            summary["validation"] = report.json();
            report.answer()
        }
        _ => Answer::Yes,
    };
    if let (Some(output), Some(text), false) = (&output, &args.calibrating.text, args.dry_run) {
        let perplexity = validate::perplexity(output, &checkpoint, text)?;
        if !args.json {
            ui::data(perplexity.before_and_after());
        }
        summary["perplexity"] = perplexity.json();
    }
    if args.json {
        print_json(&summary)?;
    }
    Ok(answer)
}

/// Where what is learnt is kept meanwhile: beside the output, or where temporary files are.
fn kept_in(output: Option<&Path>) -> PathBuf {
    match output.and_then(Path::parent) {
        Some(folder) if folder.as_os_str().is_empty() => PathBuf::from("."),
        Some(folder) => folder.into(),
        None => std::env::temp_dir(),
    }
}

fn plan(args: &Args, checkpoint: &Checkpoint) -> Result<Plan> {
    if args.batch == 0 {
        bail!("a batch of 0 rows is asked for");
    }
    Ok(Plan {
        task: args.task.map_or_else(|| checkpoint.task(), Ok)?,
        batch: args.batch,
        tokens: args.sequence_length,
        token_type_ids: args.token_type_ids,
        float: match args.precision {
            Float::Fp16 => DType::F16,
            Float::Fp32 => DType::F32,
        },
        opset: args.minimum_os.opset(),
        chunks: Chunks {
            contexts: args.context_length.clone(),
            // A short context is prefilled in chunks that fit it.
            chunk: args
                .prefill_chunk
                .0
                .map(|c| args.context_length.iter().copied().min().map_or(c, |shortest| c.min(shortest))),
            logits: match args.logits {
                Logits::Last => models::Logits::Last,
                Logits::All => models::Logits::All,
                Logits::Argmax => models::Logits::Argmax,
            },
            split_head: matches!(args.head_outputs, HeadOutputs::Split),
            update: match args.cache_update {
                CacheUpdate::Slice => Update::Slice,
                CacheUpdate::Mask => Update::Blend,
            },
            parts: args.parts.map_or(Parts::Below(args.max_part_size), Parts::Count),
            attention: args.attention.settled(args.how.target == Target::Gpu),
            buckets: args.buckets.clone(),
            max_ops: args.max_ops,
        },
    })
}

/// Any extension but `.mlpackage` is refused before anything is read.
pub(super) fn refuse_extension(output: &Path) -> Result<()> {
    match output.extension().map(|e| e.to_str()) {
        Some(Some("mlpackage")) => Ok(()),
        None if output.file_name().is_some() => Ok(()),
        _ => {
            bail!("{}: the output is a package", output.display(); hint: "give it the extension `.mlpackage`")
        }
    }
}

pub(super) fn with_extension(output: PathBuf) -> PathBuf {
    if output.extension().is_some() { output } else { output.with_added_extension("mlpackage") }
}

/// Where several parts go.
fn folder(output: PathBuf) -> Result<PathBuf> {
    if output.extension().is_some() {
        bail!("{}: several parts go into a folder", output.display(); hint: "leave the extension out, or write one package with `--parts 1`");
    }
    Ok(output)
}

/// One package, ready to be written.
struct Ready {
    stem: String,
    checked: Checked,
    interface: Interface,
    report: Option<Report>,
}

impl Ready {
    fn save(&self, path: &Path, force: bool) -> Result<(u64, u64)> {
        let late = || {
            let said = self.report.as_ref().and_then(Report::metadata);
            said.into_iter().map(|said| (QUANTIZATION.to_string(), said)).collect()
        };
        let options = Save { force, from: None, late: Some(&late) };
        let saved = package::save(path, &self.checked, &self.interface, options)?;
        Ok((saved.model_bytes, saved.weight_bytes))
    }
}

/// Writes one package, or a folder of them in one rename; gives the bytes of models and weights.
fn write(output: &Path, ready: &[Ready], several: bool, force: bool) -> Result<(u64, u64)> {
    if let ([one], false) = (ready, several) {
        return one.save(output, force);
    }
    replace_folder(output, |new| {
        let (mut model, mut weights) = (0, 0);
        for one in ready {
            let saved = one.save(&new.join(format!("{}.mlpackage", one.stem)), false)?;
            model += saved.0;
            weights += saved.1;
        }
        Ok((model, weights))
    })
}

pub(super) fn refuse_place(output: &Path, force: bool) -> Result<()> {
    let folder = output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !folder.is_dir() {
        bail!("{}: there is no such folder to write to", folder.display(); hint: "make it first");
    }
    if output.symlink_metadata().is_ok() && !force {
        bail!("{}: exists already", output.display(); hint: "`--force` replaces it");
    }
    Ok(())
}

/// The checkpoint would be gone once the output is in its place.
fn refuse_input(output: &Path, checkpoint: &Checkpoint) -> Result<()> {
    let (Ok(output_dir), Ok(dir)) = (output.canonicalize(), checkpoint.dir.canonicalize()) else {
        return Ok(());
    };
    if dir.starts_with(output_dir) {
        bail!("{}: the checkpoint is there", output.display(); hint: "write to another place");
    }
    Ok(())
}

fn interface(
    checked: &Checked,
    docs: BTreeMap<String, String>,
    contract: &serde_json::Value,
    checkpoint: &Checkpoint,
) -> Result<Interface> {
    let mut interface = Interface::of(checked.program())?;
    interface.describe(&docs);
    let user = &mut interface.metadata.user_defined;
    user.insert("silane.version".into(), env!("CARGO_PKG_VERSION").into());
    user.insert("silane.contract".into(), contract.to_string());
    user.insert("silane.source".into(), json!(sources(checkpoint)?).to_string());
    if let Some(id) = &checkpoint.hub_id {
        user.insert("co.huggingface.exporters.name".into(), id.clone());
    }
    Ok(interface)
}

/// SHA-256 of each file that the package was made from.
fn sources(checkpoint: &Checkpoint) -> Result<BTreeMap<String, String>> {
    let mut sums = BTreeMap::new();
    for path in checkpoint.files() {
        let name = path.strip_prefix(&checkpoint.dir).unwrap_or(&path).to_string_lossy().into_owned();
        sums.insert(name, sha256(&path)?);
    }
    Ok(sums)
}

fn sha256(path: &Path) -> Result<String> {
    let mut file = std::fs::File::open(path).map_err(|e| io(path, &e))?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 16]);
    loop {
        match file.read(&mut buffer).map_err(|e| io(path, &e))? {
            0 => break,
            n => hash.update(&buffer[..n]),
        }
    }
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

/// Copies tokenizer and config into a folder named as the package, without its extension, and says which.
pub(super) fn copy_beside(from: &Path, output: &Path, force: bool) -> Result<Option<PathBuf>> {
    // Parts have the tokenizer among them.
    let inside = output.extension().is_none();
    let folder = output.with_extension("");
    let files = tokenizer_files(from);
    if files.is_empty() || folder.canonicalize().ok() == from.canonicalize().ok() {
        return Ok(None);
    }
    let kept = match folder.symlink_metadata() {
        Err(_) => None,
        Ok(_) if inside => None,
        Ok(_) if !force => Some("exists already"),
        Ok(_) if tokenizer_files(&folder).len() != entries(&folder) => Some("holds other files too"),
        Ok(_) => None,
    };
    if let Some(why) = kept {
        ui::note(format!("{}: {why}, tokenizer and config were not copied", folder.display()));
        return Ok(None);
    }
    std::fs::create_dir_all(&folder).map_err(|e| io(&folder, &e))?;
    for file in files {
        let Some(name) = file.file_name() else { continue };
        std::fs::copy(&file, folder.join(name)).map_err(|e| io(&file, &e))?;
    }
    Ok(Some(folder))
}

fn entries(folder: &Path) -> usize {
    std::fs::read_dir(folder).map_or(usize::MAX, Iterator::count)
}

fn start_summary(plan: &Plan, model_type: &str, contract: &serde_json::Value) -> serde_json::Value {
    json!({
        "model_type": model_type,
        "task": plan.task.to_string(),
        "precision": plan.float.name(),
        "opset": plan.opset.wire(),
        "minimum_os": plan.opset.os(),
        "batch": contract["batch"],
        "sequence_length": contract["sequence_length"],
        "context_length": contract["context_length"],
        "prefill_chunk": contract["prefill_chunk"],
        "ops": 0,
        "ops_by_kind": {},
        "functions": {},
    })
}

/// Adds a part's ops to the summary, constants left out.
fn count_ops(summary: &mut serde_json::Value, checked: &Checked, stem: &str, several: bool) {
    for (name, function) in &checked.program().functions {
        let mut here = 0u64;
        function.body.walk(&mut |op| {
            if op.kind != "const" {
                here += 1;
                let count = summary["ops_by_kind"][&op.kind].as_u64().unwrap_or(0) + 1;
                summary["ops_by_kind"][&op.kind] = json!(count);
            }
        });
        let name = if several { format!("{stem}.{name}") } else { name.clone() };
        summary["functions"][name] = json!(here);
        summary["ops"] = json!(summary["ops"].as_u64().unwrap_or(0) + here);
    }
}

/// The summary for people.
fn tell(s: &serde_json::Value) -> String {
    let text = |key: &str| s[key].as_str().unwrap_or_default().to_string();
    let number = |key: &str| s[key].as_u64().unwrap_or_default();
    let mut kinds: Vec<(String, u64)> = s["ops_by_kind"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(k, v)| (k.clone(), v.as_u64().unwrap_or_default()))
        .collect();
    kinds.sort_by(|a, b| b.1.cmp(&a.1).then(a.0.cmp(&b.0)));
    let most: Vec<String> = kinds.iter().take(5).map(|(k, n)| format!("{k} {n}")).collect();
    let size = match s["context_length"].as_array() {
        Some(contexts) => {
            let contexts: Vec<String> = contexts.iter().map(ToString::to_string).collect();
            let chunk = s["prefill_chunk"].as_u64().map_or("no prefill".into(), |n| format!("prefill {n}"));
            format!("context {} · {chunk}", contexts.join(", "))
        }
        None => format!("{} × {} tokens", number("batch"), number("sequence_length")),
    };
    let [model_type, task, precision, os] = ["model_type", "task", "precision", "minimum_os"].map(text);
    let mut lines = vec![
        format!("{model_type} · {task} · {precision} · {size} · {os}"),
        format!("  {} ops: {}", ui::count(number("ops")), most.join(", ")),
    ];
    let functions: Vec<(&String, u64)> = s["functions"]
        .as_object()
        .into_iter()
        .flatten()
        .map(|(k, v)| (k, v.as_u64().unwrap_or_default()))
        .collect();
    if functions.len() > 1 {
        let each: Vec<String> = functions.iter().map(|(k, n)| format!("{k} {n}")).collect();
        lines.push(format!("  ops by function: {}", each.join(", ")));
    }
    lines.extend(experts(&s["experts"]));
    let seconds = s["seconds"].as_f64().unwrap_or_default();
    lines.push(match s["output"].as_str() {
        Some(output) => format!(
            "  wrote {output}: {}, of which weights {}, in {seconds:.2} s",
            ui::bytes(number("bytes")),
            ui::bytes(number("weight_bytes"))
        ),
        None => format!("  nothing written, in {seconds:.2} s"),
    });
    if let Some(folder) = s["tokenizer"].as_str() {
        lines.push(format!("  tokenizer and config are in {folder}"));
    }
    lines.join("\n")
}

/// What a mixture of experts costs beyond its router's choice.
fn experts(e: &serde_json::Value) -> Option<String> {
    let number = |key: &str| e[key].as_u64();
    let factor = |key: &str| e[key].as_f64();
    Some(format!(
        "  experts: all {} are computed for each token in {}, where the router picks {}: {:.1} × their weight bytes \
         and FLOPs;\n    with all else {} parameters a token instead of {}, {:.2} ×",
        number("computed")?,
        ui::counted(number("layers")?, "layer"),
        number("chosen")?,
        factor("factor")?,
        ui::count(number("parameters_computed")?),
        ui::count(number("parameters_chosen")?),
        factor("factor_of_all")?
    ))
}
