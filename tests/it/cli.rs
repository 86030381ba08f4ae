//! The binary itself: what it prints where, and how it exits.

mod convert;
mod gemma;
mod inspect;
mod language;
mod quantize;
mod run;
mod talk;
mod validate;

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    fs,
    io::Read,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use expect_test::expect;
use tempfile::TempDir;

use super::models;

/// A folder to run in; fixtures are copied into it, so that transcripts have short paths.
struct Bench {
    dir: TempDir,
}

impl Bench {
    fn new() -> Bench {
        Bench { dir: tempfile::tempdir().unwrap() }
    }

    /// With copies of stored checkpoints, under the last part of their names.
    fn with_models(names: &[&str]) -> Bench {
        let bench = Bench::new();
        for name in names {
            copy(&models::fixture(name), &bench.path(name.rsplit('/').next().unwrap()));
        }
        bench
    }

    /// With copies of stored packages.
    fn with_packages(names: &[&str]) -> Bench {
        let bench = Bench::new();
        for name in names {
            copy(
                &Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/packages").join(name),
                &bench.path(name),
            );
        }
        bench
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_silane"));
        command.current_dir(self.dir.path()).args(args).env("HF_HOME", "hub").env_remove("HF_HUB_CACHE");
        command
    }

    fn run(&self, args: &[&str]) -> Ran {
        let output = self.command(args).output().unwrap();
        Ran {
            code: output.status.code().unwrap(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// What a terminal would show, the two streams apart, times masked.
    fn transcript(&self, lines: &[&str]) -> String {
        let mut text = String::new();
        for line in lines {
            let ran = self.run(&words(line));
            writeln!(text, "$ silane {line}").unwrap();
            ran.out.lines().for_each(|l| writeln!(text, "{}", masked(l)).unwrap());
            ran.err.lines().for_each(|l| writeln!(text, "stderr: {}", masked(l)).unwrap());
            writeln!(text, "[exit {}]\n", ran.code).unwrap();
        }
        text
    }

    /// Every file below the folder, with its bytes.
    fn files(&self) -> BTreeMap<PathBuf, Vec<u8>> {
        files(self.dir.path())
    }
}

struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl Ran {
    /// The one JSON document on stdout.
    fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap()
    }
}

/// Words of a command line; a text with blanks is in single quotes.
fn words(line: &str) -> Vec<&str> {
    line.split('\'')
        .enumerate()
        .flat_map(|(i, part)| if i % 2 == 1 { vec![part] } else { part.split_whitespace().collect() })
        .collect()
}

/// Without times, and without numbers that depend on the order of sums.
fn masked(line: &str) -> String {
    let after = |start: &str, mark: &str, rest: &str| format!("{start}{mark} …{rest}");
    if let Some((start, _)) = line.split_once(", in ").filter(|(_, time)| time.ends_with(" s")) {
        return after(start, ", in", " s");
    }
    if let (Some((start, _)), Some((_, end))) = (line.split_once("max error"), line.split_once("; wanted")) {
        return after(start, "max error", &format!("; wanted{end}"));
    }
    for mark in ["first value off:", "KL divergence"] {
        if let Some((start, _)) = line.split_once(mark) {
            return after(start, mark, "");
        }
    }
    match (line.strip_prefix("0."), line.split_once("  ")) {
        (Some(_), Some((_, text))) => format!("0.…  {text}"),
        _ => line.into(),
    }
}

fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.insert(path.clone(), fs::read(path).unwrap());
        }
    }
    found
}

fn copy(from: &Path, to: &Path) {
    if from.is_file() {
        fs::copy(from, to).unwrap();
        return;
    }
    for (path, bytes) in files(from) {
        let to = to.join(path.strip_prefix(from).unwrap());
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::write(to, bytes).unwrap();
    }
}

#[test]
fn without_a_command_there_is_help() {
    let bench = Bench::new();
    expect![[r#"
        $ silane 
        stderr: Turns Hugging Face checkpoints into Core ML packages for the Apple Neural Engine, and proves them
        stderr: right
        stderr: 
        stderr: Usage: silane <COMMAND>
        stderr: 
        stderr: Commands:
        stderr:   convert   Turn a Hugging Face checkpoint into a Core ML package
        stderr:   quantize  Compress the weights of a package, or make them dense again
        stderr:   inspect   Show what a package is: interface, states, weights, ops
        stderr:   validate  Run a package and compare it with an independent reference
        stderr:   run       Run a package: text or tensors in, results out
        stderr:   help      Print this message or the help of the given subcommand(s)
        stderr: 
        stderr: Options:
        stderr:   -h, --help     Print help
        stderr:   -V, --version  Print version
        [exit 2]

        $ silane --help
        Turns Hugging Face checkpoints into Core ML packages for the Apple Neural Engine, and proves them
        right

        Usage: silane <COMMAND>

        Commands:
          convert   Turn a Hugging Face checkpoint into a Core ML package
          quantize  Compress the weights of a package, or make them dense again
          inspect   Show what a package is: interface, states, weights, ops
          validate  Run a package and compare it with an independent reference
          run       Run a package: text or tensors in, results out
          help      Print this message or the help of the given subcommand(s)

        Options:
          -h, --help     Print help
          -V, --version  Print version
        [exit 0]

        $ silane nonsense
        stderr: error: unrecognized subcommand 'nonsense'
        stderr: 
        stderr: Usage: silane <COMMAND>
        stderr: 
        stderr: For more information, try '--help'.
        [exit 2]

    "#]].assert_eq(&bench.transcript(&["", "--help", "nonsense"]));
}

/// Every option of every command is explained, and the commands show examples.
#[test]
fn help_is_complete() {
    let bench = Bench::new();
    for command in ["convert", "quantize", "inspect", "validate", "run"] {
        let ran = bench.run(&[command, "--help"]);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""));
        assert!(ran.out.contains("Examples:\n  silane"), "{command} has no examples");
        let lines: Vec<&str> = ran.out.lines().collect();
        for (i, line) in lines.iter().enumerate().filter(|(_, l)| l.trim_start().starts_with('-')) {
            let explained =
                line.trim().contains("  ") || lines.get(i + 1).is_some_and(|l| l.starts_with("        "));
            assert!(explained || line.trim_start().starts_with("- "), "{command}: {line}");
        }
    }
}

/// `silane inspect … | head -1`
#[test]
fn a_reader_that_goes_away_is_no_error() {
    let bench = Bench::with_models(&["rxn-albert-mlm"]);
    assert_eq!(bench.run(&["convert", "rxn-albert-mlm", "-o", "a.mlpackage"]).code, 0);
    let args = ["inspect", "a.mlpackage", "--text"];
    assert!(bench.run(&args).out.len() > 1 << 17, "the text fits a pipe's buffer");
    let mut child = bench.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut first = [0; 64];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8(output.stderr).unwrap(), "");
    assert!(output.status.code().is_none_or(|code| code == 0), "{:?}", output.status);
}
