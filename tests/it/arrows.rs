//! The tree's own rules: which room may use which, how long a file may be, and what it may not name.

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Room → the rooms it may use. `error` is open to all, and a room to itself.
const ARROWS: &[(&str, &[&str])] = &[
    ("error", &[]),
    ("mil", &[]),
    ("ops", &["mil"]),
    ("graph", &["mil", "ops"]),
    ("checkpoint", &["mil"]),
    ("package", &["mil", "ops", "graph"]),
    ("passes", &["mil", "ops", "graph"]),
    ("quant", &["mil", "ops", "graph"]),
    ("interp", &["mil", "ops"]),
    ("reference", &["checkpoint"]),
    ("nn", &["mil", "ops", "graph", "checkpoint"]),
    ("models", &["mil", "ops", "graph", "checkpoint", "nn"]),
    ("ui", &[]),
    (
        "cli",
        &[
            "mil",
            "ops",
            "graph",
            "checkpoint",
            "package",
            "passes",
            "quant",
            "interp",
            "reference",
            "nn",
            "models",
            "ui",
        ],
    ),
    ("main", &["cli", "ui"]),
];

const MAX_LINES: usize = 700;

#[test]
fn rooms_use_only_the_rooms_below_them() {
    let mut broken = Vec::new();
    for (file, text) in sources() {
        let room = room_of(&file);
        if room == "lib" {
            continue;
        }
        let Some((_, allowed)) = ARROWS.iter().find(|(r, _)| *r == room) else {
            broken.push(format!("{}: `{room}` has no arrows", file.display()));
            continue;
        };
        for used in rooms_used(code_of(&text)) {
            if used != room && used != "error" && !allowed.contains(&used.as_str()) {
                broken.push(format!("{}: {room} uses {used}", file.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn every_room_is_declared() {
    let lib = fs::read_to_string(root().join("src/lib.rs")).unwrap();
    let mods: Vec<&str> = lib.lines().filter_map(|l| l.strip_prefix("pub mod ")?.strip_suffix(';')).collect();
    let mut arrows: Vec<&str> = ARROWS.iter().map(|(r, _)| *r).filter(|r| *r != "main").collect();
    arrows.sort_unstable();
    assert_eq!(mods, arrows);
}

#[test]
fn paths_are_found_in_every_form() {
    for (code, rooms) in [
        ("use crate::mil::Op;", vec!["mil"]),
        (
            "use crate::{bail, error::{Context, Result}, mil::{Arg, Block}, ops::{self, Args}};",
            vec!["error", "mil", "ops"],
        ),
        ("let f = crate::graph::check::problems(&p);", vec!["graph"]),
        ("use silane::{cli, ui::{self}};", vec!["cli", "ui"]),
        ("use std::mem; // crate::nn::Net", vec![]),
        ("/// [`crate::passes::tidy`]", vec![]),
        ("use crate::{\n    checkpoint, // crate::nn\n    nn,\n};", vec!["checkpoint", "nn"]),
    ] {
        assert_eq!(rooms_used(code), rooms, "{code}");
    }
}

#[test]
fn files_are_short() {
    for (file, text) in sources() {
        let lines = text.lines().count();
        assert!(lines <= MAX_LINES, "{}: {lines} lines, {MAX_LINES} are the most", file.display());
    }
}

/// Paths of one machine have no place in the tree.
#[test]
fn no_file_names_a_path_of_this_machine() {
    let roots = [["/wo", "rk/"].concat(), ["/tm", "p/"].concat()];
    let dirs = ["src", "tests", "docs", ".ci"].map(|d| root().join(d));
    let documents = fs::read_dir(root()).unwrap().map(|e| e.unwrap().path());
    let documents = documents.filter(|p| p.extension().is_some_and(|e| e == "md" || e == "toml"));
    for file in dirs.iter().flat_map(|d| files(d)).chain(documents) {
        let Ok(text) = fs::read_to_string(&file) else { continue };
        for bad in &roots {
            assert!(!text.contains(bad), "{} names {bad}", file.display());
        }
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every source file, by its path under `src`, with its text.
fn sources() -> Vec<(PathBuf, String)> {
    let src = root().join("src");
    let sources: Vec<_> = files(&src)
        .into_iter()
        .filter(|f| f.extension().is_some_and(|e| e == "rs"))
        .map(|f| (f.strip_prefix(&src).unwrap().to_path_buf(), fs::read_to_string(&f).unwrap()))
        .collect();
    assert!(sources.len() > 20, "only {} files under src", sources.len());
    sources
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}

fn room_of(file: &Path) -> String {
    let first = file.components().next().unwrap().as_os_str().to_str().unwrap();
    first.trim_end_matches(".rs").to_string()
}

/// The file without its unit tests, which come last.
fn code_of(text: &str) -> &str {
    let tests = ["#[cfg(test)]", "#![cfg(test)]"].iter().filter_map(|mark| text.find(mark)).min();
    tests.map_or(text, |end| &text[..end])
}

/// First segments of all paths that start at the crate's root, in order of first use.
fn rooms_used(code: &str) -> Vec<String> {
    let code: String =
        code.lines().map(|l| l.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n");
    let mut rooms: Vec<String> = Vec::new();
    for start in ["crate::", "silane::"].iter().flat_map(|p| code.match_indices(p).map(|(i, _)| i + p.len()))
    {
        for room in first_segments(&code[start..]) {
            if is_room(&room) && !rooms.contains(&room) {
                rooms.push(room);
            }
        }
    }
    rooms
}

fn is_room(name: &str) -> bool {
    ARROWS.iter().any(|(r, _)| *r == name)
}

/// `mil::Op` has `mil`; `{bail, mil::{Arg, Op}, ops}` has `bail`, `mil` and `ops`.
fn first_segments(path: &str) -> Vec<String> {
    let word = |s: &str| s.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let Some(list) = path.strip_prefix('{') else { return vec![word(path)] };
    let (mut depth, mut start, mut found) = (0usize, 0, Vec::new());
    for (i, c) in list.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => {
                found.push(word(list[start..i].trim_start()));
                break;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                found.push(word(list[start..i].trim_start()));
                start = i + 1;
            }
            _ => {}
        }
    }
    found
}
