//! The documents say what is true: the table of architectures, the tour and the contract of `README.md`.

use std::{fs, path::Path, process::Command};

use silane::{
    checkpoint::Task,
    models::{Encoder, FAMILIES, Frame},
    package,
};

/// With `UPDATE_EXPECT` set, the table in the file is written anew.
#[test]
fn readme_lists_every_architecture_and_task() {
    let path = root().join("README.md");
    let text = fs::read_to_string(&path).unwrap();
    let (before, rest) = text.split_once("<!-- table: architectures -->\n").expect("the table's start");
    let (found, after) = rest.split_once("<!-- end -->").expect("the table's end");
    let table = architectures();
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        let new = format!("{before}<!-- table: architectures -->\n{table}<!-- end -->{after}");
        fs::write(&path, new).unwrap();
    } else {
        assert_eq!(found, table, "UPDATE_EXPECT=1 writes the table anew");
    }
}

#[test]
fn readme_tour_prints_what_it_shows() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut commands = 0;
    for block in blocks(&readme, "console") {
        for step in block.split("$ silane ").skip(1) {
            let (command, shown) = step.split_once('\n').unwrap();
            commands += 1;
            let seen = silane(dir.path(), command);
            assert!(fits(shown, &seen), "`silane {command}`\nshown:\n{shown}\nseen:\n{seen}");
        }
    }
    assert_eq!(commands, 12);

    let contract = blocks(&readme, "json").next().expect("the contract");
    let contract: serde_json::Value = serde_json::from_str(contract).unwrap();
    let package = package::open_program(&dir.path().join("albert.mlpackage")).unwrap();
    let written = &package.interface.metadata.user_defined["silane.contract"];
    assert_eq!(contract, serde_json::from_str::<serde_json::Value>(written).unwrap());
}

#[test]
fn only_measured_numbers_may_differ_from_the_tour() {
    for (shown, seen, same) in [
        ("12 ops in 0.26 s\n", "12 ops in 1.05 s\n", true),
        ("error 9.63e-2 (4e-3)\n", "error 1.1e-3 (7.25e-3)\n", true),
        ("12 ops in 0.26 s\n", "13 ops in 0.26 s\n", false),
        ("0.8587  O\n", "0.8587  C\n", false),
        ("a\n  …\nd\n", "a\nb\nc\nd\n", true),
        ("a\n  …\nd\n", "a\nb\nc\n", false),
        ("a\n  …\n", "a\n", false),
        ("a\n", "a\nb\n", false),
    ] {
        assert_eq!(fits(shown, seen), same, "{shown:?} {seen:?}");
    }
}

/// Encoders: one row a family, one column a task; decoders, which have one task, in a line of their own.
fn architectures() -> String {
    let tasks: Vec<Task> = Task::ALL.into_iter().filter(|t| *t != Task::CausalLm).collect();
    let heads: Vec<String> = tasks.iter().map(Task::to_string).collect();
    let mut table =
        format!("| `model_type` | {} |\n|---|{}\n", heads.join(" | "), ":-:|".repeat(heads.len()));
    let mut decoders = Vec::new();
    for family in FAMILIES {
        let names: Vec<String> = family.model_types.iter().map(|t| format!("`{t}`")).collect();
        match &family.frame {
            Frame::Encoder(encoder) => {
                let cells: Vec<&str> =
                    tasks.iter().map(|t| if does(encoder, *t) { "✓" } else { "" }).collect();
                table.push_str(&format!("| {} | {} |\n", names.join(", "), cells.join(" | ")));
            }
            Frame::Decoder(_) => decoders.extend(names),
        }
    }
    format!("{table}\n{}: {}\n", Task::CausalLm, decoders.join(", "))
}

fn does(encoder: &Encoder, task: Task) -> bool {
    match task {
        Task::CausalLm => false,
        Task::FeatureExtraction | Task::Embedding | Task::TokenClassification | Task::QuestionAnswering => {
            true
        }
        Task::SequenceClassification => encoder.classify.is_some(),
        Task::MaskedLm => encoder.masked_lm.is_some(),
        Task::PreTraining => encoder.discriminate.is_some(),
    }
}

/// What the command says on stderr, then on stdout.
fn silane(dir: &Path, command: &str) -> String {
    let fixtures = root().join("fixtures").display().to_string();
    let mut words = Vec::new();
    for (i, part) in command.split('\'').enumerate() {
        match i % 2 {
            0 => words.extend(part.split_whitespace().map(|w| w.replacen("fixtures", &fixtures, 1))),
            _ => words.push(part.to_string()),
        }
    }
    let output = Command::new(env!("CARGO_BIN_EXE_silane")).args(words).current_dir(dir).output().unwrap();
    assert!(output.status.success(), "`silane {command}`: {}", String::from_utf8_lossy(&output.stderr));
    let text = |bytes| String::from_utf8(bytes).unwrap();
    text(output.stderr) + &text(output.stdout)
}

/// The fenced blocks of a language.
fn blocks<'a>(text: &'a str, language: &str) -> impl Iterator<Item = &'a str> {
    text.split(&format!("```{language}\n") as &str)
        .skip(1)
        .map(|rest| rest.split_once("```").expect("the block's end").0)
        .collect::<Vec<_>>()
        .into_iter()
}

/// Whether `seen` is what is shown, up to measured numbers; a line `…` stands for one or more lines.
fn fits(shown: &str, seen: &str) -> bool {
    let lines = |text: &str| -> Vec<String> { text.trim_end().lines().map(without_measures).collect() };
    lines_fit(&lines(shown), &lines(seen))
}

fn lines_fit(shown: &[String], seen: &[String]) -> bool {
    match (shown, seen) {
        ([], []) => true,
        ([gap, shown @ ..], [_, rest @ ..]) if gap.trim() == "…" => {
            (0..=rest.len()).any(|n| lines_fit(shown, &rest[n..]))
        }
        ([a, shown @ ..], [b, seen @ ..]) => a == b && lines_fit(shown, seen),
        _ => false,
    }
}

/// Numbers with a point or an exponent depend on the processor, integers do not.
fn without_measures(line: &str) -> String {
    let measured = |word: &str| {
        let core = word.trim_matches(|c: char| !c.is_ascii_digit());
        core.parse::<f64>().is_ok() && core.contains(['.', 'e'])
    };
    line.split(' ').map(|w| if measured(w) { "#" } else { w }).collect::<Vec<_>>().join(" ")
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}
