//! Compiled bundles (`.mlmodelc`): named as such, with the ops that their MIL text has.

use std::{collections::BTreeMap, fs, path::Path};

use super::Foreign;
use crate::error::{self, Result};

pub(super) fn read(path: &Path) -> Result<Foreign> {
    let text = path.join("model.mil");
    let ops = match fs::read_to_string(&text) {
        Ok(text) => op_counts(&text),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
        Err(e) => return Err(error::io(&text, &e)),
    };
    Ok(Foreign { kind: "compiled", spec_version: spec_version(path).unwrap_or(0), ops, ..Foreign::default() })
}

fn spec_version(path: &Path) -> Option<i32> {
    let text = fs::read(path.join("metadata.json")).ok()?;
    let metadata: serde_json::Value = serde_json::from_slice(&text).ok()?;
    let version = metadata.get(0)?.get("specificationVersion")?.as_i64()?;
    i32::try_from(version).ok()
}

/// Counts the ops of MIL text: a word before a parenthesis outside of all brackets, at the start of a
/// statement or after `=`.
fn op_counts(text: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    let (mut depth, mut word, mut ready) = (0usize, String::new(), false);
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '"' => skip_string(&mut chars),
            '(' => {
                if depth == 0 && ready && !word.is_empty() && word != "program" {
                    *counts.entry(std::mem::take(&mut word)).or_default() += 1;
                }
                depth += 1;
            }
            '[' | '<' => depth += 1,
            ')' | ']' => depth = depth.saturating_sub(1),
            // Of `->`, which closes nothing.
            '>' if word == "-" => {}
            '>' => depth = depth.saturating_sub(1),
            _ => {}
        }
        match c {
            _ if depth > 0 => word.clear(),
            '=' | ';' | '{' | '}' => (ready, word) = (true, String::new()),
            c if c.is_alphanumeric() || c == '_' => word.push(c),
            '-' => word = "-".into(),
            c if c.is_whitespace() && word.is_empty() => {}
            _ => (ready, word) = (false, String::new()),
        }
    }
    counts
}

fn skip_string(chars: &mut std::str::Chars<'_>) {
    while let Some(c) = chars.next() {
        match c {
            '\\' => drop(chars.next()),
            '"' => return,
            _ => {}
        }
    }
}
