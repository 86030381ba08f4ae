//! The one place that prints: data on stdout, talk on stderr.
//!
//! A reader that goes away (`silane inspect … | head`) is no error.

use std::{
    fmt::Display,
    io::{self, IsTerminal, Write},
    sync::atomic::{AtomicBool, Ordering},
};

use crate::error::Error;

/// What a command gives back, on stdout.
pub fn data(text: impl Display) {
    let _ = writeln!(io::stdout().lock(), "{text}");
}

/// Data without a line's end, shown at once: text that streams.
pub fn stream(text: impl Display) {
    let mut out = io::stdout().lock();
    let _ = write!(out, "{text}");
    let _ = out.flush();
}

/// What a command says about its work, on stderr.
pub fn talk(text: impl Display) {
    let clear = if UNFINISHED.swap(false, Ordering::Relaxed) { "\r\x1b[K" } else { "" };
    let _ = writeln!(io::stderr().lock(), "{clear}{text}");
}

/// Whether a line of progress stands on the terminal.
static UNFINISHED: AtomicBool = AtomicBool::new(false);

/// How far a long piece of work is, in place on a terminal and nowhere else; the last leaves nothing behind.
pub fn progress(done: usize, all: usize, what: &str) {
    let mut err = io::stderr().lock();
    if err.is_terminal() {
        let text = if done < all { format!("  {done} of {all} {what}") } else { String::new() };
        UNFINISHED.store(done < all, Ordering::Relaxed);
        let _ = write!(err, "\r{text}\x1b[K");
        let _ = err.flush();
    }
}

/// Something the user may want to act on.
pub fn note(text: impl Display) {
    talk(format_args!("{} {text}", paint("note:", "36")));
}

pub fn error(e: &Error) {
    let mut text = format!("{} {}", paint("error:", "1;31"), e.message());
    for step in e.trail() {
        text.push_str(&format!("\n  {step}"));
    }
    if let Some(hint) = e.way_out() {
        text.push_str(&format!("\n  {} {hint}", paint("hint:", "36")));
    }
    talk(text);
}

fn paint(text: &str, code: &str) -> String {
    if io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none() {
        format!("\x1b[{code}m{text}\x1b[0m")
    } else {
        text.into()
    }
}

/// `12.3 MB`, in powers of ten as file managers show it.
#[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
pub fn bytes(n: u64) -> String {
    match n {
        0..1_000 => format!("{n} B"),
        1_000..1_000_000 => format!("{:.1} kB", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", n as f64 / 1e6),
        _ => format!("{:.2} GB", n as f64 / 1e9),
    }
}

/// `1,234,567`
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(d);
    }
    text
}

/// `1 tensor`, `2 tensors`
pub fn counted(n: u64, noun: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{} {noun}{s}", count(n))
}

/// Columns padded to the widest cell; the first is aligned left, numbers right.
pub fn table(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |c: usize| rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells: Vec<String> = row
            .iter()
            .zip(&widths)
            .map(|(cell, w)| if is_number(cell) { format!("{cell:>w$}") } else { format!("{cell:<w$}") })
            .collect();
        cells.join("  ").trim_end().to_string()
    };
    rows.iter().map(line).collect::<Vec<_>>().join("\n")
}

fn is_number(cell: &str) -> bool {
    cell.chars().next().is_some_and(|c| c.is_ascii_digit() || c == '-') && !cell.contains('[')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_shown_for_people() {
        assert_eq!([bytes(999), bytes(3_209_084), bytes(2_400_000_000)], ["999 B", "3.2 MB", "2.40 GB"]);
        assert_eq!([count(0), count(999), count(1_234_567)], ["0", "999", "1,234,567"]);
        assert_eq!([counted(1, "tensor"), counted(1000, "tensor")], ["1 tensor", "1,000 tensors"]);
        let rows = [vec!["conv".into(), "49".into()], vec!["layer_norm".into(), "5".into()]];
        assert_eq!(table(&rows), "conv        49\nlayer_norm   5");
    }
}
