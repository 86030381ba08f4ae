//! Validating a language model: teacher-forced logits at every position, prompts of lengths around the
//! prefill chunk, and greedy text. Packages that give no logits are judged by their tokens and scores.

use std::{collections::BTreeMap, path::Path};

use serde_json::json;

use super::{
    choices::Choices,
    session::{Model, Scores, best},
    validate::{Pairs, Precise},
};
use crate::{
    bail,
    checkpoint::Checkpoint,
    error::{Error, Result, io},
    ops::Val,
    reference::Decoder,
};

/// What a package is compared with.
pub(super) struct Lesson {
    /// Token rows, and the logits expected after each token.
    pub(super) rows: Vec<(Vec<u32>, Vec<Vec<f32>>)>,
    pub(super) greedy: Option<Greedy>,
}

/// A prompt, what follows it greedily, and the logits that chose each token.
pub(super) struct Greedy {
    pub(super) prompt: Vec<u32>,
    pub(super) tokens: Vec<u32>,
    pub(super) logits: Vec<Vec<f32>>,
}

/// How well a text is foreseen, token by token.
pub(super) struct Perplexity {
    tokens: usize,
    package: f64,
    reference: f64,
}

impl Lesson {
    /// Stored inputs and outputs, as far as the mask says that they mean something.
    pub(super) fn stored(tensors: &BTreeMap<String, Val>) -> Result<Lesson> {
        let (Some(ids), Some(logits)) = (tensors.get("input_ids"), tensors.get("logits")) else {
            bail!("the reference has no `input_ids` and `logits`");
        };
        let width = ids.tensor()?.dims().last().copied().unwrap_or(1).max(1);
        let vocabulary = logits.tensor()?.dims().last().copied().unwrap_or(1).max(1);
        let (ids, logits) = (tokens(ids)?, logits.to_floats()?);
        let mask = match tensors.get("attention_mask") {
            Some(mask) => mask.to_ints()?,
            None => vec![1; ids.len()],
        };
        let mut rows = Vec::new();
        for (i, (ids, mask)) in ids.chunks(width).zip(mask.chunks(width)).enumerate() {
            // Padding in front shifts positions, which this contract leaves to the host.
            let real = mask.iter().take_while(|m| **m != 0).count();
            let row = |t: usize| logits[(i * width + t) * vocabulary..][..vocabulary].to_vec();
            rows.push((ids[..real].to_vec(), (0..real).map(row).collect()));
        }
        rows.retain(|(ids, _)| !ids.is_empty());
        Ok(Lesson { rows, greedy: Greedy::stored(tensors)? })
    }

    /// The reference's own outputs on a prompt and what it continues with.
    pub(super) fn computed(checkpoint: &Checkpoint, prompt: &[u32], new: usize) -> Result<Lesson> {
        let decoder = Decoder::open(checkpoint)?;
        let forward = |ids: &[u32]| -> Result<Vec<Vec<f32>>> {
            let logits = decoder.forward(&[ids.to_vec()], None)?.logits;
            Ok(logits.squeeze(0)?.to_vec2::<f32>()?)
        };
        let mut all = prompt.to_vec();
        let mut chosen = Vec::new();
        for _ in 0..new {
            let Some(last) = forward(&all)?.pop() else { bail!("the prompt is empty") };
            all.push(best(&last));
            chosen.push(last);
        }
        let tokens = all[prompt.len()..].to_vec();
        let rows = vec![(all.clone(), forward(&all)?)];
        let greedy = (new > 0).then(|| Greedy { prompt: prompt.to_vec(), tokens, logits: chosen });
        Ok(Lesson { rows, greedy })
    }
}

impl Greedy {
    fn stored(tensors: &BTreeMap<String, Val>) -> Result<Option<Greedy>> {
        let get = |name: &str| tensors.get(&format!("greedy.{name}"));
        let (Some(prompt), Some(ids), Some(logits)) = (get("prompt_ids"), get("token_ids"), get("logits"))
        else {
            return Ok(None);
        };
        let width = logits.tensor()?.dims().last().copied().unwrap_or(1).max(1);
        let logits = logits.to_floats()?.chunks(width).map(<[f32]>::to_vec).collect();
        Ok(Some(Greedy { prompt: tokens(prompt)?, tokens: tokens(ids)?, logits }))
    }
}

fn tokens(v: &Val) -> Result<Vec<u32>> {
    v.to_ints()?
        .into_iter()
        .map(|i| u32::try_from(i).map_err(|_| Error::new(format!("{i} is no token id"))))
        .collect()
}

/// What was seen of a lesson: logits, or the tokens and scores of a package that gives no logits.
#[derive(Default)]
pub(super) struct Findings {
    pub(super) pairs: Pairs,
    pub(super) choices: BTreeMap<String, Choices>,
    pub(super) greedy: Option<Choices>,
}

impl Findings {
    fn add(&mut self, call: &str, seen: &Scores, expected: &[f32], share: f64) {
        match seen {
            Scores::Logits(logits) => self.pairs.push(&format!("logits {call}"), logits, expected),
            Scores::Best { token, score } => {
                self.pairs.push_best(&format!("token_scores {call}"), *score, expected);
                let choices = self.choices.entry(format!("token_ids {call}")).or_default();
                choices.add_best(*token, expected, share);
            }
        }
    }
}

/// Runs the lesson; `share` is what a logit may be off by, of their spread.
pub(super) fn examine(model: &Model, lesson: &Lesson, precision: Precise, share: f64) -> Result<Findings> {
    let mut seen = Findings::default();
    for (ids, expected) in &lesson.rows {
        let mut session = model.session(precision.into())?;
        let ids = &ids[..ids.len().min(session.context)];
        for (id, expected) in ids.iter().zip(expected) {
            seen.add("of decode", &session.decode(*id)?, expected, share);
        }
        for length in lengths(session.chunk(), &session.edges(), ids.len()) {
            let mut session = model.session(precision.into())?;
            let scores = session.prompt(&ids[..length])?;
            seen.add("of prefill", &scores, &expected[length - 1], share);
            // One more token shows whether the cache is right.
            if let (Some(next), Some(expected)) = (ids.get(length), expected.get(length)) {
                seen.add("after prefill", &session.decode(*next)?, expected, share);
            }
        }
    }
    if let Some(greedy) = &lesson.greedy {
        seen.greedy = Some(continue_greedily(model, greedy, precision, share)?);
    }
    Ok(seen)
}

/// Prompt lengths on both sides of the first two chunks and of the tokens that each prefill function sees,
/// and the whole.
fn lengths(chunk: Option<usize>, edges: &[usize], all: usize) -> Vec<usize> {
    let Some(t) = chunk else { return Vec::new() };
    let mut lengths = vec![1, t.saturating_sub(1), t, t + 1, 2 * t, 2 * t + 1, all];
    lengths.extend(edges.iter().flat_map(|e| [e.saturating_sub(1), *e, e + 1]));
    lengths.retain(|n| (1..=all).contains(n));
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

fn continue_greedily(model: &Model, greedy: &Greedy, precision: Precise, share: f64) -> Result<Choices> {
    let mut session = model.session(precision.into())?;
    let mut choices = Choices::default();
    let mut scores = session.prompt(&greedy.prompt)?;
    for (expected, want) in greedy.tokens.iter().zip(&greedy.logits) {
        choices.add(scores.best(), *expected, want, share);
        if session.position == session.context {
            break;
        }
        // The expected token goes on, so that later steps can be compared too.
        scores = session.decode(*expected)?;
    }
    Ok(choices)
}

impl Perplexity {
    /// Of a file's tokens, as many as the context takes.
    pub(super) fn measure(
        model: &Model,
        checkpoint: &Checkpoint,
        file: &Path,
        precision: Precise,
    ) -> Result<Perplexity> {
        let text = std::fs::read_to_string(file).map_err(|e| io(file, &e))?;
        let mut session = model.session(precision.into())?;
        let ids = checkpoint.tokenizer()?.encode_cut(&text, session.context)?.ids;
        if ids.len() < 2 {
            bail!("{}: {} tokens are no text to foresee", file.display(), ids.len());
        }
        let expected =
            Decoder::open(checkpoint)?.forward(std::slice::from_ref(&ids), None)?.logits.squeeze(0)?;
        let (mut package, mut reference) = (0.0, 0.0);
        for (i, next) in ids[1..].iter().enumerate() {
            package += surprise(session.decode(ids[i])?.logits()?, *next)?;
            reference += surprise(&expected.get(i)?.to_vec1::<f32>()?, *next)?;
        }
        #[expect(clippy::cast_precision_loss, reason = "a context is far below 2⁵³")]
        let mean = |sum: f64| sum / (ids.len() - 1) as f64;
        Ok(Perplexity { tokens: ids.len(), package: mean(package).exp(), reference: mean(reference).exp() })
    }

    pub(super) fn text(&self) -> String {
        let Perplexity { tokens, package, reference } = self;
        format!("perplexity of {tokens} tokens: {package:.4}, the reference's {reference:.4}")
    }

    /// The reference's is that of the weights before they were compressed.
    pub(super) fn before_and_after(&self) -> String {
        let row = |cells: [String; 3]| cells.to_vec();
        let head = ["perplexity", "before", "after"].map(String::from);
        let tokens = format!("of {} tokens", self.tokens);
        let figures = [tokens, format!("{:.4}", self.reference), format!("{:.4}", self.package)];
        crate::ui::table(&[row(head), row(figures)])
    }

    pub(super) fn json(&self) -> serde_json::Value {
        json!({ "tokens": self.tokens, "package": self.package, "reference": self.reference })
    }
}

/// The negative log-likelihood of a token, in nats.
fn surprise(logits: &[f32], token: u32) -> Result<f64> {
    let Some(chosen) = logits.get(token as usize) else {
        bail!("token {token} is not among {} logits", logits.len());
    };
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - largest).exp()).sum();
    Ok(sum.ln() - f64::from(chosen - largest))
}
