//! The chat template of a tokenizer's folder: messages in, the prompt that a model was trained on out.
//!
//! The one rule: a template sees what Transformers shows it, and renders as it does there.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::{SystemTime, UNIX_EPOCH},
};

use minijinja::{Environment, ErrorKind, Value, context, syntax::SyntaxConfig};
use serde_json::Value as Json;

use super::{read_json_if_any, tokenizer::token_text};
use crate::{
    bail,
    error::{Error, Result, io},
};

#[derive(Debug)]
pub struct ChatTemplate {
    /// Where it was found.
    path: PathBuf,
    source: String,
    /// Special tokens by the names that templates call them.
    tokens: BTreeMap<&'static str, String>,
}

/// Far more steps than a conversation needs, and few enough to end soon.
const STEPS: u64 = 1_000_000;

impl ChatTemplate {
    /// Opens `chat_template.jinja`, or the template in `tokenizer_config.json`.
    pub fn open(dir: &Path) -> Result<ChatTemplate> {
        let (file, config) = (dir.join("chat_template.jinja"), dir.join("tokenizer_config.json"));
        let settings = [read_json_if_any(&config)?, read_json_if_any(&dir.join("special_tokens_map.json"))?];
        let (path, source) = if file.is_file() {
            let source = std::fs::read_to_string(&file).map_err(|e| io(&file, &e))?;
            (file, source)
        } else if let Some(source) = settings[0].as_ref().and_then(|s| stored(s.get("chat_template")?)) {
            (config, source.to_string())
        } else {
            bail!(
                "{}: there is no chat template", dir.display();
                hint: "one is in `chat_template.jinja` or `tokenizer_config.json` of models that were tuned for chat"
            );
        };
        let token = |key: &'static str| {
            let text = settings.iter().flatten().find_map(|s| token_text(s.get(key)?))?;
            Some((key, text.to_string()))
        };
        let tokens =
            ["bos_token", "eos_token", "unk_token", "pad_token"].into_iter().filter_map(token).collect();
        Ok(ChatTemplate { path, source, tokens })
    }

    /// The prompt of messages, each a role and what it says, up to where the model's answer begins.
    pub fn render(&self, messages: &[(&str, &str)]) -> Result<String> {
        self.try_render(messages).map_err(|e| {
            let line = e.line().map(|n| format!("line {n}: ")).unwrap_or_default();
            let detail = e.detail().map(|d| format!(": {d}")).unwrap_or_default();
            Error::new(format!("{}: chat template: {line}{}{detail}", self.path.display(), e.kind()))
        })
    }

    fn try_render(&self, messages: &[(&str, &str)]) -> Result<String, minijinja::Error> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_fuel(Some(STEPS));
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        let message = |(role, content): &(&str, &str)| context! { role => *role, content => *content };
        let token = |key: &str| self.tokens.get(key).map_or(Value::UNDEFINED, Value::from);
        let source = without_generation(&self.source);
        environment.template_from_named_str("chat", &source)?.render(context! {
            messages => messages.iter().map(message).collect::<Vec<_>>(),
            add_generation_prompt => true,
            tools => (),
            documents => (),
            bos_token => token("bos_token"),
            eos_token => token("eos_token"),
            unk_token => token("unk_token"),
            pad_token => token("pad_token"),
        })
    }
}

/// A template is a string, or the one called `default` of a list.
fn stored(value: &Json) -> Option<&str> {
    match value {
        Json::Array(all) => all.iter().find(|t| t["name"] == "default")?.get("template")?.as_str(),
        other => other.as_str(),
    }
}

/// Transformers' own block says which tokens are trained on; its content is rendered like any other.
fn without_generation(source: &str) -> String {
    let mut text = source.to_string();
    for (left, right) in [("{%", "%}"), ("{%-", "%}"), ("{%", "-%}"), ("{%-", "-%}")] {
        for (tag, plain) in [("generation", "if true"), ("endgeneration", "endif")] {
            text = text.replace(&format!("{left} {tag} {right}"), &format!("{left} {plain} {right}"));
        }
    }
    text
}

fn raise_exception(message: String) -> Result<Value, minijinja::Error> {
    Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
}

/// Today (UTC) in the words of `strftime`, as far as templates use them.
#[expect(clippy::needless_pass_by_value, reason = "the shape that a template's function takes")]
fn strftime_now(format: String) -> Result<String, minijinja::Error> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    date(seconds / 86_400, &format)
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A day since 1970 in the words of `strftime`.
fn date(day: u64, format: &str) -> Result<String, minijinja::Error> {
    let (year, month, day) = civil(day);
    let mut text = String::new();
    let mut letters = format.chars();
    while let Some(letter) = letters.next() {
        if letter != '%' {
            text.push(letter);
            continue;
        }
        match letters.next() {
            Some('d') => text.push_str(&format!("{day:02}")),
            Some('m') => text.push_str(&format!("{:02}", month + 1)),
            Some('b') => text.push_str(&MONTHS[month][..3]),
            Some('B') => text.push_str(MONTHS[month]),
            Some('Y') => text.push_str(&year.to_string()),
            other => {
                let what = other.map(String::from).unwrap_or_default();
                let why = format!("strftime_now knows no `%{what}`");
                return Err(minijinja::Error::new(ErrorKind::InvalidOperation, why));
            }
        }
    }
    Ok(text)
}

/// Year, month from 0 and day of the month from 1.
fn civil(mut day: u64) -> (u64, usize, u64) {
    let leap = |y: u64| y.is_multiple_of(4) && (!y.is_multiple_of(100) || y.is_multiple_of(400));
    let mut year = 1970;
    while day >= 365 + u64::from(leap(year)) {
        day -= 365 + u64::from(leap(year));
        year += 1;
    }
    let mut month = 0;
    for length in [31, 28 + u64::from(leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if day < length {
            break;
        }
        day -= length;
        month += 1;
    }
    (year, month, day + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_have_dates() {
        for (day, expected) in [
            (0, "01 January 1970 Jan 01"),
            (58, "28 February 1970 Feb 02"),
            (789, "29 February 1972 Feb 02"),
            (19_722, "31 December 2023 Dec 12"),
            (19_783, "01 March 2024 Mar 03"),
        ] {
            assert_eq!(date(day, "%d %B %Y %b %m").unwrap(), expected);
        }
        assert!(date(0, "%H").unwrap_err().to_string().contains("`%H`"));
    }
}
