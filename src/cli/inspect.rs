//! `silane inspect`: what a package is, at a glance, as MIL text, or as JSON.

use std::{
    collections::{BTreeMap, HashSet},
    path::{Path, PathBuf},
};

use serde_json::{Value as Json, json};

use super::{Answer, print_json, sweep, validate, weights};
use crate::{
    bail,
    error::Result,
    graph::{self, Severity},
    mil::{Block, Data, Function, Program, print},
    ops::{self, Opset},
    package::{self, Feature, Foreign, Interface, Opened, Package},
    ui,
};

const EXAMPLES: &str = "\
Examples:
  silane inspect bert.mlpackage
  silane inspect bert.mlpackage --text | less
  silane inspect smollm2/ --sweep --context-length 8192
  silane inspect bert.mlpackage --dump encoder_layer_0_output_dense_weight dense.npy";

#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Args {
    /// A package, a bare `.mlmodel`, or a compiled bundle; with `--sweep` a checkpoint's folder
    package: PathBuf,
    /// Print the program as MIL text
    #[arg(long, conflicts_with_all = ["json", "weights", "dump"])]
    text: bool,
    /// Print everything as JSON
    #[arg(long)]
    json: bool,
    /// List every weight: name, type, bits, bytes
    #[arg(long, conflicts_with = "dump")]
    weights: bool,
    /// Of a language model's checkpoint: what prefill takes by chunk and tile
    #[arg(long, conflicts_with_all = ["text", "weights", "lint", "dump"])]
    sweep: bool,
    /// For `--sweep`: tokens that the cache holds
    #[arg(long, value_name = "N", default_value_t = 4096, requires = "sweep")]
    context_length: usize,
    /// Check the rules that Core ML's own tools do not; exits with 1 where one is broken
    #[arg(long, conflicts_with_all = ["text", "weights", "dump"])]
    lint: bool,
    /// Write the decoded values of one weight, by its name in `--weights`
    #[arg(long, value_names = ["NAME", "FILE.npy"], num_args = 2)]
    dump: Option<Vec<String>>,
}

pub(super) fn run(args: &Args) -> Result<Answer> {
    if !args.package.join("Manifest.json").exists() && validate::holds_parts(&args.package) {
        bail!("{}: this is a folder of packages", args.package.display(); hint: "give one of them: {}", packages(&args.package));
    }
    if args.sweep {
        return sweep::run(&args.package, args.context_length, args.json);
    }
    if args.package.join("config.json").is_file() {
        bail!("{}: this is a checkpoint, not a package", args.package.display(); hint: "`silane convert` makes a package of it");
    }
    let package = match package::open(&args.package)? {
        Opened::Program(package) => package,
        Opened::Other(foreign) if args.text || args.weights || args.lint || args.dump.is_some() => {
            return Err(foreign.refusal().at(args.package.display()));
        }
        Opened::Other(foreign) if args.json => {
            print_json(&foreign_json(&foreign))?;
            return Ok(Answer::Yes);
        }
        Opened::Other(foreign) => {
            ui::data(foreign_text(&args.package, &foreign));
            return Ok(Answer::Yes);
        }
    };
    if let Some([name, file]) = args.dump.as_deref() {
        weights::dump(&package.program, name, Path::new(file))?;
        return Ok(Answer::Yes);
    }
    unreadable(&package).for_each(ui::note);
    if args.text {
        let place = |kind: &str, param: &str| {
            ops::find(kind).and_then(|s| s.params.iter().position(|p| p.name == param)).unwrap_or(usize::MAX)
        };
        ui::data(print::text(&package.program, &place).trim_end());
        return Ok(Answer::Yes);
    }
    let view = View::of(&package);
    if args.json {
        print_json(&view.json(&package))?;
    } else if args.weights {
        ui::data(weights::table(&package.program));
    } else {
        ui::data(view.text(&args.package, &package, args.lint));
    }
    Ok(if args.lint && view.broken() { Answer::No } else { Answer::Yes })
}

/// The packages of a folder, by name.
fn packages(folder: &Path) -> String {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path());
    let mut names: Vec<String> = entries
        .filter(|p| p.extension().is_some_and(|e| e == "mlpackage"))
        .map(|p| format!("`{}`", p.display()))
        .collect();
    names.sort();
    names.join(", ")
}

/// Why weight files cannot be read; the graph is shown all the same.
fn unreadable(package: &Package) -> impl Iterator<Item = String> {
    package.weight_files.iter().filter_map(|file| Some(file.reader().err()?.message().to_string()))
}

/// What is counted and found once for both forms of output.
struct View {
    ops: BTreeMap<String, BTreeMap<String, u64>>,
    consts: u64,
    unknown: BTreeMap<String, u64>,
    weights: Vec<(String, u64, u64)>,
    problems: Vec<graph::Problem>,
    rewritable: Option<String>,
}

impl View {
    fn of(package: &Package) -> View {
        let program = &package.program;
        let (mut ops_by, mut unknown, mut consts) = (BTreeMap::new(), BTreeMap::new(), 0);
        for (name, function) in &program.functions {
            let kinds: &mut BTreeMap<String, u64> = ops_by.entry(name.clone()).or_default();
            function.body.walk(&mut |op| {
                if op.kind == "const" {
                    consts += 1;
                    return;
                }
                *kinds.entry(op.kind.clone()).or_default() += 1;
                if ops::find(&op.kind).is_none() {
                    *unknown.entry(op.kind.clone()).or_default() += 1;
                }
            });
        }
        let mut problems = graph::problems(program);
        problems.extend(package::interface::problems(&package.interface, program, package.spec_version));
        View {
            ops: ops_by,
            consts,
            unknown,
            weights: stored(program),
            problems,
            rewritable: package.rewritable().err().map(|e| e.to_string()),
        }
    }

    fn broken(&self) -> bool {
        self.problems.iter().any(|p| p.severity == Severity::Error)
    }

    fn json(&self, package: &Package) -> Json {
        let interface = &package.interface;
        json!({
            "kind": "mlProgram",
            "specification_version": package.spec_version,
            "opset": opset(&package.program),
            "functions": interface.functions.iter().map(|f| json!({
                "name": f.name,
                "inputs": features_json(&f.inputs),
                "outputs": features_json(&f.outputs),
                "states": features_json(&f.states),
                "ops": self.ops.get(&f.name).or_else(|| self.ops.get("main")),
            })).collect::<Vec<_>>(),
            "default_function": interface.default_function,
            "metadata": metadata_json(interface),
            "constants": self.consts,
            "unknown_ops": self.unknown,
            "weights": self.weights.iter().map(|(dtype, count, bytes)| json!({
                "dtype": dtype, "tensors": count, "bytes": bytes,
            })).collect::<Vec<_>>(),
            "unreadable_weights": unreadable(package).collect::<Vec<_>>(),
            "problems": self.problems.iter().map(|p| json!({
                "severity": if p.severity == Severity::Error { "error" } else { "note" },
                "rule": p.rule, "place": p.place, "message": p.message,
            })).collect::<Vec<_>>(),
            "not_rewritable": self.rewritable,
        })
    }

    fn weights_text(&self) -> String {
        let (tensors, total) = self.weights.iter().fold((0, 0), |(n, b), w| (n + w.1, b + w.2));
        if tensors == 0 {
            return "no weights in files".into();
        }
        let row = |(dtype, count, bytes): &(String, u64, u64)| {
            vec![dtype.clone(), count.to_string(), ui::bytes(*bytes)]
        };
        let rows: Vec<Vec<String>> = self.weights.iter().map(row).collect();
        format!(
            "weights: {} in {}\n{}",
            ui::bytes(total),
            ui::counted(tensors, "tensor"),
            indent(&ui::table(&rows))
        )
    }

    fn text(&self, path: &Path, package: &Package, lint: bool) -> String {
        let mut lines = vec![format!(
            "{}: ML Program, {}, specification version {}",
            path.display(),
            opset(&package.program),
            package.spec_version
        )];
        lines.extend(metadata_text(&package.interface));
        for f in &package.interface.functions {
            if package.interface.multi_function {
                let default = if f.name == package.interface.default_function { " (default)" } else { "" };
                lines.push(format!("\nfunction {}{default}", f.name));
            }
            for (title, list) in [("inputs", &f.inputs), ("outputs", &f.outputs), ("states", &f.states)] {
                if !list.is_empty() {
                    lines.push(format!("\n{title}\n{}", features_text(list)));
                }
            }
            let kinds = self.ops.get(&f.name).or_else(|| self.ops.get("main"));
            lines.push(format!("\n{}", ops_text(kinds)));
        }
        lines.push(format!("\n{}", self.weights_text()));
        if !self.unknown.is_empty() {
            let kinds: Vec<String> = self.unknown.iter().map(|(k, n)| format!("{k} {n}")).collect();
            lines.push(format!("\nops silane does not know: {}", kinds.join(", ")));
        }
        if let Some(why) = &self.rewritable {
            lines.push(format!("\nthe package can be read but not rewritten: {why}"));
        }
        let errors = self.problems.iter().filter(|p| p.severity == Severity::Error).count() as u64;
        let notes = ui::counted(self.problems.len() as u64 - errors, "note");
        if lint {
            let listed = self.problems.iter().map(|p| match p.severity {
                Severity::Error => format!("error: {p}"),
                Severity::Note => format!("note: {p}"),
            });
            lines.push(String::new());
            lines.extend(listed);
            lines.push(format!("{}, {notes}", ui::counted(errors, "error")));
        } else if errors > 0 {
            lines.push(format!("\n{}, {notes}; `--lint` lists them", ui::counted(errors, "broken rule")));
        }
        lines.join("\n")
    }
}

/// Element type → tensors and bytes of what is in weight files, each blob counted once.
fn stored(program: &Program) -> Vec<(String, u64, u64)> {
    let mut seen = HashSet::new();
    let mut by_type: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    let mut count = |function: &Function, block: &Block| {
        let _ = function;
        block.walk(&mut |op| {
            let params = op.args().filter_map(|a| match a {
                crate::mil::Arg::Const(c) => Some(c),
                crate::mil::Arg::Value(_) => None,
            });
            for c in op.attrs.values().chain(params) {
                if let Data::Weight(w) = &c.data
                    && seen.insert(w.key.clone())
                {
                    let entry = by_type.entry(w.dtype.name().into()).or_default();
                    entry.0 += 1;
                    entry.1 += w.dtype.packed_len(w.count()).unwrap_or(0) as u64;
                }
            }
        });
    };
    for function in program.functions.values() {
        count(function, &function.body);
    }
    by_type.into_iter().map(|(dtype, (n, bytes))| (dtype, n, bytes)).collect()
}

fn opset(program: &Program) -> String {
    let names: HashSet<&str> = program.functions.values().map(|f| f.opset.as_str()).collect();
    let mut names: Vec<&str> = names.into_iter().collect();
    names.sort_unstable();
    let show = |n: &&str| {
        Opset::from_wire(n)
            .map_or_else(|| format!("opset `{n}`, which silane does not know"), |o| o.to_string())
    };
    names.iter().map(show).collect::<Vec<_>>().join(", ")
}

fn features_text(features: &[Feature]) -> String {
    let rows: Vec<Vec<String>> = features
        .iter()
        .map(|f| {
            let optional = if f.optional { " optional" } else { "" };
            vec![f.name.clone(), format!("{}{optional}", f.ty), f.description.clone()]
        })
        .collect();
    indent(&ui::table(&rows))
}

fn features_json(features: &[Feature]) -> Vec<Json> {
    features
        .iter()
        .map(|f| json!({"name": f.name, "type": f.ty.to_string(), "optional": f.optional, "description": f.description}))
        .collect()
}

fn ops_text(kinds: Option<&BTreeMap<String, u64>>) -> String {
    let Some(kinds) = kinds else { return "no ops".into() };
    let mut rows: Vec<(&String, &u64)> = kinds.iter().collect();
    rows.sort_by(|a, b| b.1.cmp(a.1).then(a.0.cmp(b.0)));
    let table: Vec<Vec<String>> = rows.iter().map(|(k, n)| vec![(*k).clone(), n.to_string()]).collect();
    format!("ops: {}\n{}", ui::count(kinds.values().sum()), indent(&ui::table(&table)))
}

fn metadata_json(interface: &Interface) -> Json {
    let m = &interface.metadata;
    json!({
        "description": m.description, "version": m.version, "author": m.author, "license": m.license,
        "user_defined": m.user_defined,
    })
}

fn metadata_text(interface: &Interface) -> Vec<String> {
    let m = &interface.metadata;
    let named = [
        ("description", &m.description),
        ("author", &m.author),
        ("license", &m.license),
        ("version", &m.version),
    ];
    let mut lines: Vec<String> =
        named.iter().filter(|(_, v)| !v.is_empty()).map(|(k, v)| format!("  {k}: {}", short(v))).collect();
    lines.extend(m.user_defined.iter().map(|(k, v)| format!("  {k}: {}", short(&readable(k, v)))));
    lines
}

/// The contract in words; it is JSON in full with `--json`.
fn readable(key: &str, value: &str) -> String {
    let contract = |json: Json| {
        let what = format!("{} for {}", json["family"].as_str()?, json["task"].as_str()?);
        Some([Some(what), language(&json)].into_iter().flatten().collect::<Vec<_>>().join(", "))
    };
    let known = (key == "silane.contract").then(|| serde_json::from_str(value).ok()).flatten();
    known.and_then(contract).unwrap_or_else(|| value.into())
}

/// Context, chunk, outputs and part of a language model.
fn language(contract: &Json) -> Option<String> {
    let contexts: Vec<String> =
        contract["context_length"].as_array()?.iter().map(ToString::to_string).collect();
    let mut words = vec![format!("context {}", contexts.join(" or "))];
    words.push(match contract["prefill_chunk"].as_u64() {
        Some(chunk) => format!("prefill {chunk}{}", forms(&contract["functions"])),
        None => "no prefill".into(),
    });
    words.push(format!("logits {}", contract["logits"].as_str()?));
    let (parts, part) = (contract["parts"].as_array()?.len(), contract["part"].as_u64()?);
    if parts > 1 {
        words.push(format!("part {} of {parts}", part + 1));
    }
    Some(words.join(", "))
}

/// How prefill functions attend: ` (tiled)`, ` (tiled up to 256, 1024; block-sparse)`.
fn forms(functions: &Json) -> String {
    let mut by_form: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
    for f in functions.as_object().into_iter().flatten().map(|(_, f)| f) {
        let end = f["max_position"].as_u64().zip(f["tokens"].as_u64()).map(|(p, t)| p + t);
        if let (Some(form), Some(end), true) =
            (f["attention"]["form"].as_str(), end, f["tokens"].as_u64() > Some(1))
        {
            by_form.entry(form).or_default().push(end);
        }
    }
    let form = |(form, ends): (&str, Vec<u64>)| {
        let mut ends = ends;
        ends.sort_unstable();
        match ends.as_slice() {
            [_] => form.to_string(),
            many => {
                format!("{form} up to {}", many.iter().map(u64::to_string).collect::<Vec<_>>().join(", "))
            }
        }
    };
    let forms: Vec<String> = by_form.into_iter().rev().map(form).collect();
    if forms.is_empty() { String::new() } else { format!(" ({})", forms.join("; ")) }
}

fn short(text: &str) -> String {
    let line = text.replace('\n', " ");
    match line.char_indices().nth(100) {
        Some((cut, _)) => format!("{}…", &line[..cut]),
        None => line,
    }
}

fn indent(text: &str) -> String {
    text.lines().map(|l| format!("  {l}")).collect::<Vec<_>>().join("\n")
}

fn foreign_text(path: &Path, foreign: &Foreign) -> String {
    let mut lines = vec![format!("{}: {foreign}", path.display())];
    if foreign.spec_version > 0 {
        lines.push(format!("  specification version {}", foreign.spec_version));
    }
    describe_foreign(foreign, "", &mut lines);
    lines.join("\n")
}

/// `place` is the way through pipelines, `model 0 / `.
fn describe_foreign(foreign: &Foreign, place: &str, lines: &mut Vec<String>) {
    for f in &foreign.interface.functions {
        for (title, list) in [("inputs", &f.inputs), ("outputs", &f.outputs)] {
            if !list.is_empty() {
                lines.push(format!("\n{title}\n{}", features_text(list)));
            }
        }
    }
    if !foreign.custom.is_empty() {
        lines.push(format!("\ncustom classes: {}", foreign.custom.join(", ")));
    }
    if !foreign.ops.is_empty() {
        let kinds = foreign.ops.iter().map(|(k, n)| (k.clone(), *n as u64)).collect();
        lines.push(format!("\n{}", ops_text(Some(&kinds))));
    }
    for (name, model) in &foreign.models {
        lines.push(format!("\n{place}{name}: {model}"));
        describe_foreign(model, &format!("{place}{name} / "), lines);
    }
}

fn foreign_json(foreign: &Foreign) -> Json {
    json!({
        "kind": foreign.kind,
        "what": foreign.to_string(),
        "specification_version": foreign.spec_version,
        "ops": foreign.ops,
        "custom": foreign.custom,
        "models": foreign.models.iter().map(|(name, m)| json!({"name": name, "model": foreign_json(m)})).collect::<Vec<_>>(),
        "functions": foreign.interface.functions.iter().map(|f| json!({
            "inputs": features_json(&f.inputs), "outputs": features_json(&f.outputs),
        })).collect::<Vec<_>>(),
        "metadata": metadata_json(&foreign.interface),
    })
}
