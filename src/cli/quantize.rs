//! `silane quantize`: package → quant → check → package.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Instant,
};

use serde_json::{Value as Json, json};

use super::{
    Answer,
    compress::{self, How},
    convert::{MinimumOs, byte_size, copy_beside, refuse_extension, refuse_place, with_extension},
    print_json, replace_folder, validate, write_beside,
};
use crate::{
    bail,
    error::{Context, Result, io},
    graph::{self, Checked},
    mil::Program,
    ops::Opset,
    package::{self, Package, Save},
    quant::{self, Budget, Policy, Report},
    ui,
};

const EXAMPLES: &str = "\
Schemes: fp16; int8, uint8, int4, uint4 with :o a searched zero point, :t one scale, :bN blocks of N inputs;
lut1, 2, 3, 4, 6, 8 with :gN channels a table, :v2 and :v4 vectors, :i8 entries, :exact; sparse50 or 2:4,
alone or before one of these, as in sparse50+lut4. w8a8 is int8 of weights and of the activations they meet,
which `convert` learns from a text (`--calibrate`).

A recipe is a TOML file: `default`, `smallest`, and `[[rule]]` with `weight` (a pattern) or `op`, and `scheme`;
the first rule that fits a weight decides.

A budget chooses among lut3:g16, lut4:g16, lut4:g8, lut6:g16, lut8, lut8:g32, int8 and fp16, before iOS 18 among
lut4, lut6, lut8, int8 and fp16, of which those that run badly on the target are left out.

Examples:
  silane quantize bert.mlpackage -o small.mlpackage --scheme lut4:g16
  silane quantize llama/ -o llama-int4/ --target gpu --reference checkpoint/
  silane quantize bert.mlpackage -o small.mlpackage --max-size 30MB
  silane quantize small.mlpackage -o dense.mlpackage --decompress";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// The package, or a folder of parts
    package: PathBuf,
    /// The package to write, `NAME.mlpackage`, or a folder for parts
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
    /// How weights are compressed; lut4:g16 for the Neural Engine, int4:b32 for the GPU, when left out
    #[arg(long, value_name = "SCHEME|RECIPE.toml", conflicts_with = "decompress")]
    scheme: Option<String>,
    /// Choose a scheme for each weight so that all take so many bits a weight, as in `4.5bpw`, by the errors of weights
    #[arg(long, value_name = "BITS", conflicts_with_all = ["scheme", "max_size", "decompress"])]
    budget: Option<Budget>,
    /// Choose a scheme for each weight so that all weights are no larger
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["scheme", "decompress"], value_parser = byte_size)]
    max_size: Option<u64>,
    #[command(flatten)]
    how: How,
    /// Weights of fewer elements stay as they are; 2048 when left out
    #[arg(long, value_name = "N", conflicts_with = "decompress")]
    smallest: Option<usize>,
    /// Compress anew what is compressed already
    #[arg(long, conflicts_with = "decompress")]
    recompress: bool,
    /// Make compressed weights dense instead
    #[arg(long)]
    decompress: bool,
    /// Raise the program to what newer systems have
    #[arg(long, value_name = "OS", value_enum)]
    minimum_os: Option<MinimumOs>,
    /// Validate before and after, against the checkpoint or stored inputs and outputs
    #[arg(long, value_name = "CHECKPOINT|FILE.safetensors")]
    reference: Option<String>,
    /// Write down the recipe that was used
    #[arg(long, value_name = "FILE.toml", conflicts_with = "decompress")]
    write_recipe: Option<PathBuf>,
    /// Replace an output that exists
    #[arg(long)]
    force: bool,
    /// Print the report as JSON
    #[arg(long)]
    json: bool,
}

/// One package of the model, ready to be written.
struct Part {
    stem: String,
    package: Package,
    checked: Checked,
    report: Option<Report>,
}

pub(super) fn run(args: &Args) -> Result<Answer> {
    let start = Instant::now();
    let folder = !args.package.join("Manifest.json").exists() && validate::holds_parts(&args.package);
    let output = output(args, folder)?;
    let packages = open(&args.package, folder)?;
    let policy = match args.decompress {
        true => None,
        false => Some(policy(args, &packages)?),
    };
    if let (Some(file), Some(policy)) = (&args.write_recipe, &policy) {
        write_beside(file, policy.text()?.as_bytes())?;
    }
    let mut parts = Vec::new();
    for (stem, package) in packages {
        parts.push(prepare(args, policy.as_ref(), stem, package)?);
    }
    let reports = || parts.iter().filter_map(|p| Some((p.stem.clone(), p.report.as_ref()?)));
    if let Some(policy) = &policy {
        policy.refuse_unused(reports().map(|(_, r)| r.used.as_slice()))?;
        if reports().all(|(_, r)| r.tensors.is_empty()) {
            let left = reports().map(|(_, r)| compress::left(&r.skipped));
            return Err(compress::nothing(left)).at(args.package.display());
        }
    }
    let before = args.reference.as_ref().map(|r| validate::measure(&args.package, r)).transpose()?;
    let saved = write(&output, &parts, folder, args)?;
    let tokenizer = match folder {
        true => None,
        false => copy_beside(&args.package.with_extension(""), &output, args.force)?,
    };
    let after = args.reference.as_ref().map(|r| validate::measure(&output, r)).transpose()?;
    let mut notes: Vec<&String> = reports().flat_map(|(_, r)| &r.notes).collect();
    notes.dedup();
    notes.iter().for_each(ui::note);
    let reports: Vec<(String, &Report)> = reports().collect();
    let seconds = start.elapsed().as_secs_f64();
    if args.json {
        let mut json = match reports.as_slice() {
            [(stem, report)] if stem.is_empty() => report.json(),
            many => {
                json!({ "parts": many.iter().map(|(s, r)| (s.clone(), r.json())).collect::<BTreeMap<_, _>>() })
            }
        };
        json["output"] = json!(output.display().to_string());
        json["bytes"] = json!(saved.0 + saved.1);
        json["weight_file_bytes"] = json!(saved.1);
        json["seconds"] = json!(seconds);
        json["recipe"] = policy.as_ref().map(Policy::text).transpose()?.map_or(Json::Null, Json::from);
        json["validation"] = json!({
            "before": before.as_ref().map(validate::Report::json), "after": after.as_ref().map(validate::Report::json),
        });
        print_json(&json)?;
    } else {
        if !reports.is_empty() {
            ui::data(compress::table(&reports));
            ui::talk(compress::summary(&reports));
        }
        ui::talk(format!(
            "  wrote {}: {}, of which weights {}, in {seconds:.2} s",
            output.display(),
            ui::bytes(saved.0 + saved.1),
            ui::bytes(saved.1)
        ));
        if let Some(folder) = tokenizer {
            ui::talk(format!("  tokenizer and config are in {}", folder.display()));
        }
        if let (Some(before), Some(after)) = (&before, &after) {
            ui::data(validate::side_by_side(before, after));
        }
    }
    Ok(Answer::Yes)
}

fn output(args: &Args, folder: bool) -> Result<PathBuf> {
    refuse_extension(&args.output)?;
    let output = if folder { args.output.clone() } else { with_extension(args.output.clone()) };
    if folder && output.extension().is_some() {
        bail!("{}: several parts go into a folder", output.display(); hint: "leave the extension out");
    }
    refuse_place(&output, args.force)?;
    if folder {
        if output.exists() && !validate::holds_parts(&output) {
            bail!("{}: exists already and holds no packages, so it is not replaced", output.display(); hint: "choose another name, or remove it yourself");
        }
        let real = |p: &Path| p.canonicalize().ok();
        if let (Some(from), Some(to)) = (real(&args.package), real(&output))
            && (from.starts_with(&to) || to.starts_with(&from))
        {
            bail!("{}: the parts that are being read are there", output.display(); hint: "write to another place");
        }
    }
    Ok(output)
}

/// The packages, by their names without extension; a single one has none.
fn open(path: &Path, folder: bool) -> Result<Vec<(String, Package)>> {
    if !folder {
        let package = package::open_program(path)?;
        package.rewritable()?;
        return Ok(vec![(String::new(), package)]);
    }
    let mut packages = BTreeMap::new();
    for entry in std::fs::read_dir(path).map_err(|e| io(path, &e))? {
        let part = entry.map_err(|e| io(path, &e))?.path();
        if let (Some("mlpackage"), Some(stem)) = (part.extension().and_then(|e| e.to_str()), part.file_stem())
        {
            let package = package::open_program(&part)?;
            package.rewritable()?;
            packages.insert(stem.to_string_lossy().into_owned(), package);
        }
    }
    Ok(packages.into_iter().collect())
}

fn options(args: &Args) -> quant::Options {
    quant::Options { recompress: args.recompress, ..args.how.options() }
}

fn policy(args: &Args, packages: &[(String, Package)]) -> Result<Policy> {
    let declared = packages.iter().flat_map(|(_, p)| p.program.functions.values());
    let opset = declared.filter_map(|f| Opset::from_wire(&f.opset)).max().unwrap_or(Opset::Ios15);
    let opset = args.minimum_os.map_or(opset, |os| opset.max(os.opset()));
    let smallest = args.smallest.unwrap_or(quant::SMALLEST);
    if let Some(budget) = args.budget.or(args.max_size.map(Budget::Bytes)) {
        let raised =
            packages.iter().map(|(_, p)| raised(args, p, &mut |_| ())).collect::<Result<Vec<_>>>()?;
        let programs: Vec<&Program> = raised.iter().collect();
        let choices = compress::choices(&programs, opset, smallest, options(args), None);
        let chosen = choices.and_then(|c| c.within(budget)).at(args.package.display())?;
        ui::talk(compress::chosen(&chosen));
        return Ok(chosen.policy);
    }
    let mut policy = compress::policy(args.scheme.as_deref(), args.how.target, opset)?;
    if let Some(smallest) = args.smallest {
        policy.smallest = smallest;
    }
    Ok(policy)
}

/// The program of a package, raised to what is asked for.
fn raised(args: &Args, package: &Package, note: &mut dyn FnMut(&String)) -> Result<Program> {
    let mut program = package.program.clone();
    if let Some(os) = args.minimum_os {
        quant::raise(&mut program, os.opset()).at(package.path.display())?.iter().for_each(note);
    }
    Ok(program)
}

fn prepare(args: &Args, policy: Option<&Policy>, stem: String, package: Package) -> Result<Part> {
    let place = package.path.display().to_string();
    let mut program = raised(args, &package, &mut |n| ui::note(n))?;
    let report = match policy {
        Some(policy) => Some(quant::apply(&mut program, policy, options(args)).at(&place)?),
        None => {
            if quant::decompress(&mut program).at(&place)? == 0 {
                bail!("{place}: no weight is compressed");
            }
            None
        }
    };
    let checked = graph::check(program).at(&place)?;
    Ok(Part { stem, package, checked, report })
}

/// Writes the package, or a folder of them in one rename; gives the bytes of models and weights.
fn write(output: &Path, parts: &[Part], folder: bool, args: &Args) -> Result<(u64, u64)> {
    let save = |part: &Part, path: &Path, force: bool| {
        let late = || {
            let said = part.report.as_ref().and_then(Report::metadata);
            said.into_iter().map(|said| (QUANTIZATION.to_string(), said)).collect()
        };
        let mut interface = part.package.interface.clone();
        interface.metadata.user_defined.remove(QUANTIZATION);
        let options = Save { force, from: Some(&part.package), late: Some(&late) };
        let saved = package::save(path, &part.checked, &interface, options)?;
        Ok((saved.model_bytes, saved.weight_bytes))
    };
    match parts {
        [part] if !folder => save(part, output, args.force),
        parts => replace_folder(output, |new| {
            let mut sum = (0, 0);
            for part in parts {
                let saved = save(part, &new.join(format!("{}.mlpackage", part.stem)), false)?;
                sum = (sum.0 + saved.0, sum.1 + saved.1);
            }
            take_along(&args.package, new)?;
            Ok(sum)
        }),
    }
}

/// Tokenizer, config and whatever else is a file beside the parts.
fn take_along(from: &Path, to: &Path) -> Result<()> {
    for entry in std::fs::read_dir(from).map_err(|e| io(from, &e))? {
        let path = entry.map_err(|e| io(from, &e))?.path();
        if let (true, Some(name)) = (path.is_file(), path.file_name()) {
            std::fs::copy(&path, to.join(name)).map_err(|e| io(&path, &e))?;
        }
    }
    Ok(())
}

/// Where a package says how its weights are compressed.
pub(super) const QUANTIZATION: &str = "silane.quantization";
