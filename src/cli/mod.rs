//! The command line: one file per command, each a thin line of calls into the rooms.
//!
//! Exit codes: 0 done, 1 the answer is no, 2 error.

mod attention;
mod calibrate;
mod choices;
mod compress;
mod convert;
mod generate;
mod inspect;
mod layers;
mod quantize;
mod run;
mod sample;
mod session;
mod sparsity;
mod sweep;
mod teacher;
mod validate;
mod weights;

use std::{io::Write, path::Path, process::ExitCode};

use clap::{Parser, Subcommand};

use crate::{
    error::{Error, Result, io},
    ui,
};

#[derive(Parser)]
#[command(name = "silane", version, about, long_about = None, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Turn a Hugging Face checkpoint into a Core ML package
    Convert(convert::Args),
    /// Compress the weights of a package, or make them dense again
    Quantize(quantize::Args),
    /// Show what a package is: interface, states, weights, ops
    Inspect(inspect::Args),
    /// Run a package and compare it with an independent reference
    Validate(validate::Args),
    /// Run a package: text or tensors in, results out
    Run(run::Args),
}

/// How a command that finished ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Yes,
    No,
}

pub fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Convert(args) => convert::run(&args),
        Command::Quantize(args) => quantize::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Validate(args) => validate::run(&args),
        Command::Run(args) => run::run(&args),
    };
    match result {
        Ok(Answer::Yes) => ExitCode::SUCCESS,
        Ok(Answer::No) => ExitCode::from(1),
        Err(e) => {
            ui::error(&e);
            ExitCode::from(2)
        }
    }
}

/// Prints a JSON document, the only thing on stdout.
fn print_json(value: &serde_json::Value) -> Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(|e| Error::new(e.to_string()))?;
    ui::data(text);
    Ok(())
}

/// Writes a file beside its place, then renames it there.
fn write_beside(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(|e| io(folder, &e))?;
    file.write_all(bytes).map_err(|e| io(path, &e))?;
    file.persist(path).map_err(|e| io(path, &e.error))?;
    Ok(())
}

/// Fills a folder beside its place and moves it there in one step. What was there goes; it comes back where
/// the move fails.
fn replace_folder<T>(output: &Path, fill: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    let parent = output.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let beside =
        tempfile::Builder::new().prefix(".silane-").tempdir_in(parent).map_err(|e| io(parent, &e))?;
    let (new, old) = (beside.path().join("new"), beside.path().join("old"));
    std::fs::create_dir(&new).map_err(|e| io(&new, &e))?;
    let filled = fill(&new)?;
    let was_there = output.symlink_metadata().is_ok();
    if was_there {
        std::fs::rename(output, &old).map_err(|e| io(output, &e))?;
    }
    if let Err(e) = std::fs::rename(&new, output) {
        if was_there {
            // The error that is reported is the first one.
            drop(std::fs::rename(&old, output));
        }
        return Err(io(output, &e));
    }
    Ok(filled)
}
