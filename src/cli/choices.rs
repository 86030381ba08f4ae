//! Judging tokens that a package chose: by greedy text, and by all of its calls where it gives no logits.

use serde_json::json;

use super::session::best;
use crate::interp::compare::spread;

/// How the choices of one kind of call went.
#[derive(Default)]
pub(super) struct Choices {
    tokens: usize,
    equal: usize,
    /// The first other token that is not excused, or else the first one.
    other: Option<Other>,
}

/// A token that the reference did not choose.
struct Other {
    step: usize,
    seen: u32,
    expected: u32,
    /// How far the expected token is ahead of it, by the reference's logits.
    margin: f64,
    /// Two logits that may both be off by the limit may rightly change places within this.
    excused: f64,
}

impl Other {
    fn passes(&self) -> bool {
        self.margin <= self.excused
    }
}

impl Choices {
    /// Adds a choice; the reference chose `expected` by its `logits`, and `share` is what each of them may be
    /// off by, of their spread.
    pub(super) fn add(&mut self, seen: u32, expected: u32, logits: &[f32], share: f64) {
        let step = self.tokens;
        self.tokens += 1;
        if seen == expected {
            self.equal += 1;
            return;
        }
        let logit = |token: u32| logits.get(token as usize).copied().map(f64::from);
        let margin = logit(expected).zip(logit(seen)).map_or(f64::INFINITY, |(e, s)| e - s);
        let other = Other { step, seen, expected, margin, excused: 2.0 * share * spread(logits) };
        if self.other.as_ref().is_none_or(|o| o.passes() && !other.passes()) {
            self.other = Some(other);
        }
    }

    /// Adds what was chosen where the reference has the logits.
    pub(super) fn add_best(&mut self, seen: u32, logits: &[f32], share: f64) {
        self.add(seen, best(logits), logits, share);
    }

    pub(super) fn passes(&self) -> bool {
        self.other.as_ref().is_none_or(Other::passes)
    }

    pub(super) fn text(&self, name: &str) -> String {
        let verdict = if self.passes() { "PASS" } else { "FAIL" };
        let mut text = format!("{verdict} {name}: {} of {} tokens equal", self.equal, self.tokens);
        if let Some(o) = &self.other {
            text.push_str(&format!(
                "\n     other token at step {}: {} for {}, which is ahead by {:.2e}; {:.2e} is excused",
                o.step, o.seen, o.expected, o.margin, o.excused
            ));
        }
        text
    }

    pub(super) fn short(&self) -> String {
        format!("{} of {} tokens equal", self.equal, self.tokens)
    }

    pub(super) fn json(&self) -> serde_json::Value {
        json!({
            "tokens": self.tokens,
            "equal": self.equal,
            "pass": self.passes(),
            "other": self.other.as_ref().map(|o| json!({
                "step": o.step, "seen": o.seen, "expected": o.expected,
                // JSON has no infinity: a token that is none of the vocabulary's is infinitely far.
                "margin": o.margin.min(1e9), "excused": o.excused, "pass": o.passes(),
            })),
        })
    }
}
