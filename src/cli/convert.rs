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

use super::{Answer, print_json, validate};
use crate::{
    bail,
    checkpoint::{Checkpoint, Task, tokenizer_files},
    error::{Result, io},
    graph::{self, Checked},
    mil::DType,
    models::{self, Part, Plan},
    ops::Opset,
    package::{self, Interface, Save},
    passes, ui,
};

const EXAMPLES: &str = "\
Examples:
  silane convert bert/ -o bert.mlpackage --validate
  silane convert org/sentences -o sentences.mlpackage --sequence-length 256 --batch 8
  silane convert bert/ --dry-run --json";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// A checkpoint's folder, or the id of one in the Hugging Face cache
    #[arg(required_unless_present = "list")]
    checkpoint: Option<String>,
    /// The package to write, `NAME.mlpackage`; tokenizer and config go beside it, into `NAME/`
    #[arg(short, long, value_name = "OUT", required_unless_present_any = ["list", "dry_run"])]
    output: Option<PathBuf>,
    /// What the package computes; the checkpoint's own task when left out
    #[arg(long)]
    task: Option<Task>,
    /// Tokens per row; as many as the checkpoint has positions for, at most 128, when left out
    #[arg(long, value_name = "N")]
    sequence_length: Option<usize>,
    /// Rows per prediction
    #[arg(long, value_name = "N", default_value_t = 1)]
    batch: usize,
    /// Take the segment of each token as an input; without it all are of segment 0
    #[arg(long)]
    token_type_ids: bool,
    /// Element type of weights and activations
    #[arg(long, value_enum, default_value_t = Float::Fp16)]
    precision: Float,
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
enum MinimumOs {
    /// iOS 16, macOS 13
    Ios16,
    /// iOS 17, macOS 14
    Ios17,
    /// iOS 18, macOS 15
    Ios18,
    /// iOS 26, macOS 26
    Ios26,
}

pub(super) fn run(args: &Args) -> Result<Answer> {
    if args.list {
        models::model_types().for_each(ui::data);
        return Ok(Answer::Yes);
    }
    let start = Instant::now();
    let name = args.checkpoint.as_deref().unwrap_or_default();
    let output = args.output.as_deref().map(package_path).transpose()?;
    if let Some(output) = &output {
        refuse_place(output, args.force)?;
    }
    let checkpoint = Checkpoint::open(name)?;
    if let Some(output) = &output {
        refuse_input(output, &checkpoint)?;
    }
    checkpoint.notes.iter().for_each(ui::note);
    let model_type = args.model_type.as_deref().map_or_else(|| checkpoint.config.model_type(), Ok)?;
    let plan = plan(args, &checkpoint)?;
    let mut part = models::build(&checkpoint, &plan, model_type)?;
    part.notes.iter().for_each(ui::note);
    passes::tidy(&mut part.program)?;
    let Part { program, docs, contract, .. } = part;
    let checked = graph::check(program)?;
    let interface = interface(&checked, docs, &contract, &checkpoint)?;
    let mut summary = summary(&checked, &plan, model_type, &contract);
    if let (Some(output), false) = (&output, args.dry_run) {
        let saved = package::save(output, &checked, &interface, Save { force: args.force, from: None })?;
        if !args.no_tokenizer
            && let Some(folder) = copy_beside(&checkpoint, output, args.force)?
        {
            summary["tokenizer"] = json!(folder.display().to_string());
        }
        summary["bytes"] = json!(saved.model_bytes + saved.weight_bytes);
        summary["weight_bytes"] = json!(saved.weight_bytes);
        summary["output"] = json!(output.display().to_string());
    }
    summary["seconds"] = json!(start.elapsed().as_secs_f64());
    if !args.json {
        ui::talk(tell(&summary));
    }
    let answer = match (&output, args.validate && !args.dry_run) {
        (Some(output), true) => {
            let report = validate::against_checkpoint(output, &checkpoint, validate::Precise::Fp16)?;
            if !args.json {
                ui::talk(report.text());
            }
            summary["validation"] = report.json();
            report.answer()
        }
        _ => Answer::Yes,
    };
    if args.json {
        print_json(&summary)?;
    }
    Ok(answer)
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
        opset: match args.minimum_os {
            MinimumOs::Ios16 => Opset::Ios16,
            MinimumOs::Ios17 => Opset::Ios17,
            MinimumOs::Ios18 => Opset::Ios18,
            MinimumOs::Ios26 => Opset::Ios26,
        },
    })
}

/// The output's path with its extension; any but `.mlpackage` is refused before anything is read.
fn package_path(output: &Path) -> Result<PathBuf> {
    match output.extension().and_then(|e| e.to_str()) {
        Some("mlpackage") => Ok(output.to_path_buf()),
        None if output.file_name().is_some() => Ok(output.with_added_extension("mlpackage")),
        _ => {
            bail!("{}: the output is a package", output.display(); hint: "give it the extension `.mlpackage`")
        }
    }
}

fn refuse_place(output: &Path, force: bool) -> Result<()> {
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
fn copy_beside(checkpoint: &Checkpoint, output: &Path, force: bool) -> Result<Option<PathBuf>> {
    let folder = output.with_extension("");
    let files = tokenizer_files(&checkpoint.dir);
    if files.is_empty() || folder.canonicalize().ok() == checkpoint.dir.canonicalize().ok() {
        return Ok(None);
    }
    let kept = match folder.symlink_metadata() {
        Err(_) => None,
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

fn summary(
    checked: &Checked,
    plan: &Plan,
    model_type: &str,
    contract: &serde_json::Value,
) -> serde_json::Value {
    let mut ops: BTreeMap<&str, u64> = BTreeMap::new();
    for function in checked.program().functions.values() {
        function.body.walk(&mut |op| {
            if op.kind != "const" {
                *ops.entry(op.kind.as_str()).or_default() += 1;
            }
        });
    }
    json!({
        "model_type": model_type,
        "task": plan.task.to_string(),
        "precision": plan.float.name(),
        "opset": plan.opset.wire(),
        "minimum_os": plan.opset.os(),
        "batch": plan.batch,
        "sequence_length": contract["sequence_length"],
        "ops": ops.values().sum::<u64>(),
        "ops_by_kind": ops,
    })
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
    let mut lines = vec![
        format!(
            "{} · {} · {} · {} × {} tokens · {}",
            text("model_type"),
            text("task"),
            text("precision"),
            number("batch"),
            number("sequence_length"),
            text("minimum_os")
        ),
        format!("  {} ops: {}", ui::count(number("ops")), most.join(", ")),
    ];
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
