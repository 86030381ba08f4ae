//! `silane run` on a language model: a prompt in, text out as it comes.

use std::time::Instant;

use super::{
    Answer,
    session::{Model, Scores},
};
use crate::{
    bail,
    checkpoint::{ChatTemplate, Tokenizer},
    error::{Context, Result},
    interp::Precision,
    ui,
};

/// How text is made.
#[derive(clap::Args)]
pub(super) struct Sampling {
    /// Put the prompt, as a user's message, into the chat template beside the tokenizer
    #[arg(long, requires = "prompts")]
    pub(super) chat: bool,
    /// What the system's message says, before the user's
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub(super) system: Option<String>,
    /// The most tokens to generate
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub(super) max_tokens: usize,
    /// How freely tokens are chosen, 1 as the model says; 0 always takes the likeliest one
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    pub(super) temperature: f32,
    /// With a temperature: choose among the N likeliest tokens only
    #[arg(long, value_name = "N")]
    pub(super) top_k: Option<usize>,
    /// With a temperature: choose among the likeliest tokens that make up this share only
    #[arg(long, value_name = "P")]
    pub(super) top_p: Option<f32>,
    /// With a temperature: the same seed gives the same text
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) seed: u64,
}

pub(super) fn run(
    model: &Model,
    folder: &std::path::Path,
    prompts: &[String],
    precision: Precision,
    sampling: &Sampling,
) -> Result<Answer> {
    if model.is_argmax() && sampling.draws() {
        bail!(
            "the package gives the likeliest token only, so there is nothing to choose from";
            hint: "leave `--temperature`, `--top-k` and `--top-p` out, or convert with `--logits last`"
        );
    }
    let tokenizer =
        Tokenizer::open(folder).hint(|| "say where the tokenizer is with `--tokenizer DIR`".into())?;
    let template = sampling.chat.then(|| ChatTemplate::open(folder)).transpose()?;
    for prompt in prompts {
        let ids = match &template {
            Some(template) => tokenizer.encode_written(&template.render(&sampling.messages(prompt))?)?.ids,
            None => tokenizer.encode(prompt)?.ids,
        };
        generate(model, &tokenizer, ids, precision, sampling)?;
    }
    Ok(Answer::Yes)
}

fn generate(
    model: &Model,
    tokenizer: &Tokenizer,
    mut ids: Vec<u32>,
    precision: Precision,
    sampling: &Sampling,
) -> Result<()> {
    if ids.is_empty() {
        bail!("the prompt has no tokens");
    }
    let mut session = model.session(precision)?;
    let ends = model.ends();
    let mut draw = Draw(sampling.seed ^ 0x9e37_79b9_7f4a_7c15);
    let start = Instant::now();
    let mut scores = session.prompt(&ids)?;
    let prefill = start.elapsed().as_secs_f64();
    let (first, start) = (ids.len(), Instant::now());
    let mut shown = tokenizer.decode(&ids, true)?.len();
    loop {
        let next = sampling.choose(&scores, &mut draw)?;
        if ends.contains(&next) || ids.len() - first == sampling.max_tokens {
            break;
        }
        ids.push(next);
        let text = tokenizer.decode(&ids, true)?;
        // A character that is not complete yet waits for its other tokens.
        if !text.ends_with('\u{fffd}') {
            ui::stream(text.get(shown..).unwrap_or_default());
            shown = text.len();
        }
        if session.position == session.context {
            ui::stream("\n");
            ui::note(format!("the context of {} tokens is full", session.context));
            break;
        }
        scores = session.decode(next)?;
    }
    ui::stream("\n");
    let (new, decode) = (ids.len() - first, start.elapsed().as_secs_f64());
    #[expect(clippy::cast_precision_loss, reason = "rates are shown with one digit")]
    let rate = |n: usize, s: f64| n as f64 / s.max(1e-9);
    ui::talk(format!(
        "prefill {first} tokens, {:.1} tokens/s; decode {new} tokens, {:.1} tokens/s",
        rate(first, prefill),
        rate(new, decode)
    ));
    Ok(())
}

impl Sampling {
    fn messages<'a>(&'a self, prompt: &'a str) -> Vec<(&'a str, &'a str)> {
        let system = self.system.as_deref().map(|text| ("system", text));
        system.into_iter().chain([("user", prompt)]).collect()
    }

    /// Whether anything but the likeliest token may be asked for.
    fn draws(&self) -> bool {
        self.temperature > 0.0 || self.top_k.is_some() || self.top_p.is_some()
    }

    fn choose(&self, scores: &Scores, draw: &mut Draw) -> Result<u32> {
        if self.temperature <= 0.0 {
            return Ok(scores.best());
        }
        let logits = scores.logits()?;
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weight = |l: f32| f64::from((l - largest) / self.temperature).exp();
        let mut order: Vec<(usize, f64)> = logits.iter().map(|l| weight(*l)).enumerate().collect();
        order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if let Some(k) = self.top_k {
            order.truncate(k.max(1));
        }
        if let Some(p) = self.top_p {
            let total: f64 = order.iter().map(|o| o.1).sum();
            let mut sum = 0.0;
            let enough = order.iter().position(|o| {
                sum += o.1;
                sum >= f64::from(p) * total
            });
            order.truncate(enough.map_or(order.len(), |i| i + 1));
        }
        let total: f64 = order.iter().map(|o| o.1).sum();
        let mut at = draw.unit() * total;
        for (i, w) in &order {
            at -= w;
            if at <= 0.0 {
                return Ok(u32::try_from(*i).unwrap_or(0));
            }
        }
        Ok(order.last().map_or(0, |(i, _)| u32::try_from(*i).unwrap_or(0)))
    }
}

/// xorshift64*: small, and the same everywhere.
struct Draw(u64);

impl Draw {
    fn unit(&mut self) -> f64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        #[expect(clippy::cast_precision_loss, reason = "53 bits are kept")]
        let unit = (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11) as f64 / (1u64 << 53) as f64;
        unit
    }
}
