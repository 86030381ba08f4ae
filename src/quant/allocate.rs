//! Choosing a scheme for each weight so that all of them fit a size and cost as little as they can.
//!
//! A choice costs what its relative error of the weight's outputs costs the model's predictions. Starting
//! from the smallest, the step that gains most for each byte is taken until none fits: first along the lower
//! hull of each weight's choices, then wherever there is room left. Each choice of a large weight is tried so.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    str::FromStr,
    sync::Arc,
};

use super::{
    apply::{Options, apply_calibrated},
    calibration::{Calibration, tensors_of},
    guard::Target,
    policy::{Policy, Rule},
    report::{Report, Skipped},
    scheme::Scheme,
};
use crate::{
    bail,
    error::{Context, Error, Result},
    mil::Program,
    ops::Opset,
};

/// How large all weights may be.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Budget {
    /// Bits for each element of all weights, compressed or not.
    BitsPerWeight(f64),
    Bytes(u64),
}

impl FromStr for Budget {
    type Err = Error;

    fn from_str(text: &str) -> Result<Budget> {
        let bits = text.strip_suffix("bpw").unwrap_or(text).trim().parse::<f64>();
        match bits {
            Ok(bits) if bits > 0.0 && bits <= 16.0 => Ok(Budget::BitsPerWeight(bits)),
            _ => bail!("`{text}` is no budget"; hint: "bits for each weight, up to 16, as in `4.5bpw`"),
        }
    }
}

/// What was chosen.
#[derive(Debug)]
pub struct Allocation {
    pub policy: Policy,
    /// The same, by the checkpoint's names of tensors; of several schemes for parts of one, the first.
    schemes: BTreeMap<String, Scheme>,
    /// What single weights' costs add up to: nats a token, or relative errors where nothing was calibrated.
    pub loss: f64,
    /// Nats a token that they were seen to diverge by.
    pub measured: Option<f64>,
    /// Bytes of all weights.
    pub bytes: u64,
    pub bits_per_weight: f64,
}

/// What the weights of some programs may become, which are parts of one model.
#[derive(Debug)]
pub struct Choices {
    candidates: Vec<Scheme>,
    /// Weights of fewer elements stay.
    smallest: usize,
    items: Vec<Item>,
    /// Bytes of weights that stay as they are.
    fixed: u64,
    elements: u64,
    /// What is no weight, is compressed already, or stays for another reason.
    pub skipped: Vec<Skipped>,
}

/// One weight and what may become of it.
#[derive(Debug, Clone)]
struct Item {
    names: BTreeSet<String>,
    /// The checkpoint's names of what it is made from.
    tensors: Vec<String>,
    choices: Vec<Choice>,
    chosen: usize,
}

impl Item {
    /// Bytes of its largest choice.
    fn largest(&self) -> u64 {
        self.choices.iter().map(|c| c.bytes).max().unwrap_or(0)
    }
}

#[derive(Debug, Clone, Copy)]
struct Choice {
    scheme: Scheme,
    bytes: u64,
    /// Of what the weight makes, relative.
    error: f64,
    loss: f64,
}

/// By how much losses beyond those of one scheme for all are tried to count for more than foreseen: not at all, so much
/// that none is chosen, and in between. What is foreseen is measured on few tokens, and for weights by themselves.
const DOUBTS: [f64; 4] = [1e12, 4.0, 2.0, 1.0];

/// Of a weight that is one part in so many of all bytes, each choice is weighed with all others; and of one that is
/// one part in `MAIN`, each is tried.
const LARGE: u64 = 32;
const MAIN: u64 = 4;
/// How much more than the best may be foreseen of what is tried.
const CLOSE: f64 = 1.5;

/// The schemes that are chosen from.
pub fn candidates(opset: Opset) -> Result<Vec<Scheme>> {
    let all: &[&str] = match opset {
        Opset::Ios15 => {
            bail!("{opset} has none of the compressed forms"; hint: "`--minimum-os ios18` has all")
        }
        Opset::Ios16 | Opset::Ios17 => &["lut4", "lut6", "lut8", "int8", "fp16"],
        _ => &["lut3:g16", "lut4:g16", "lut4:g8", "lut6:g16", "lut8", "lut8:g32", "int8", "fp16"],
    };
    all.iter().map(|text| text.parse()).collect()
}

/// The schemes by which it is measured how much depends on each weight: those of the candidates that cost most.
pub fn probes(opset: Opset) -> Result<Vec<Scheme>> {
    let all: &[&str] = if opset >= Opset::Ios18 { &["lut4:g16", "lut3:g16"] } else { &["lut4"] };
    all.iter().map(|text| text.parse()).collect()
}

impl Allocation {
    /// What becomes of a tensor of the checkpoint, where it is among the weights.
    pub fn scheme(&self, tensor: &str) -> Option<&Scheme> {
        self.schemes.get(tensor)
    }
}

impl Choices {
    /// Tries every candidate on every weight of `smallest` elements or more. Without calibration, or where it knows
    /// nothing of a weight, a weight's relative error is what counts.
    pub fn measure(
        programs: &[&Program],
        candidates: &[Scheme],
        smallest: usize,
        options: Options,
        calibration: Option<&Arc<Calibration>>,
    ) -> Result<Choices> {
        let mut items: BTreeMap<String, Item> = BTreeMap::new();
        let (mut fixed, mut elements, mut skipped) = (0u64, 0u64, Vec::new());
        for program in programs {
            let mut reports: Vec<(Scheme, Report)> = Vec::new();
            for scheme in candidates.iter().filter(|s| **s != Scheme::Dense) {
                let policy = Policy { smallest, ..Policy::uniform(*scheme) };
                let report = apply_calibrated(&mut (*program).clone(), &policy, options, calibration)?;
                reports.push((*scheme, report));
            }
            let Some((_, first)) = reports.first() else { bail!("there is nothing to choose from") };
            elements += first.elements;
            fixed += first.before;
            skipped.extend(first.skipped.iter().cloned());
            for entry in &first.tensors {
                // The same weight has the same source, whatever becomes of it.
                let source = entry.cell.source();
                let dense = source.dtype.packed_len(source.count()).unwrap_or(0) as u64;
                if let Some(known) = items.get_mut(&source.key) {
                    known.names.insert(entry.name.clone());
                    continue;
                }
                fixed = fixed.saturating_sub(dense);
                let mut tried = Vec::new();
                for (scheme, report) in &reports {
                    let found = report.tensors.iter().find(|e| e.cell.source().key == source.key);
                    tried.extend(found.map(|e| (*scheme, e.scheme, e.bytes)));
                }
                let errors = entry.cell.losses(&tried.iter().map(|t| t.1).collect::<Vec<_>>())?;
                let choice = |((scheme, _, bytes), error): (&(Scheme, Scheme, u64), f64)| Choice {
                    scheme: *scheme,
                    bytes: *bytes,
                    error,
                    loss: calibration.and_then(|c| c.cost(&source.key, error)).unwrap_or(f64::NAN),
                };
                let mut choices: Vec<Choice> = tried.iter().zip(errors).map(choice).collect();
                if candidates.contains(&Scheme::Dense) {
                    choices.push(Choice { scheme: Scheme::Dense, bytes: dense, error: 0.0, loss: 0.0 });
                }
                let names = [entry.name.clone()].into();
                let tensors = tensors_of(&source.key).unwrap_or_default();
                let tensors = tensors.into_iter().map(str::to_string).collect();
                items.insert(source.key.clone(), Item { names, tensors, choices, chosen: 0 });
            }
        }
        let mut items: Vec<Item> = items.into_values().collect();
        estimate_unknown(&mut items);
        Ok(Choices { candidates: candidates.to_vec(), smallest, items, fixed, elements, skipped })
    }

    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// The best of them within a budget, as foreseen.
    pub fn within(&self, budget: Budget) -> Result<Allocation> {
        self.with_doubt(budget, 1.0, None)
    }

    /// The best of some within a budget, as measured: `cost` tells by how many nats a token predictions diverge with all
    /// weights of a choice. From the largest scheme that fits for all weights, more and more of what is foreseen
    /// is believed; and what a weight that is a good part of all may become is tried, each with what is best then.
    pub fn nearest(
        &self,
        budget: Budget,
        mut cost: impl FnMut(&Allocation) -> Result<f64>,
    ) -> Result<Allocation> {
        let foreseen = self.within(budget)?;
        let mut tried: Vec<Allocation> = Vec::new();
        let mut add = |one: Allocation| {
            if tried.iter().all(|t| t.schemes != one.schemes) {
                tried.push(one);
            }
        };
        for doubt in DOUBTS {
            add(self.with_doubt(budget, doubt, None)?);
        }
        let whole: u64 = self.items.iter().map(Item::largest).sum();
        for (at, item) in self.items.iter().enumerate().filter(|(_, i)| MAIN * i.largest() >= whole) {
            let each =
                item.choices.iter().filter_map(|c| self.with_doubt(budget, 1.0, Some((at, c.scheme))).ok());
            each.filter(|one| one.loss <= CLOSE * foreseen.loss).for_each(&mut add);
        }
        let mut nearest: Option<(f64, Allocation)> = None;
        for one in tried {
            let measured = cost(&one)?;
            if nearest.as_ref().is_none_or(|(least, _)| measured < *least) {
                nearest = Some((measured, Allocation { measured: Some(measured), ..one }));
            }
        }
        nearest.map_or_else(|| self.within(budget), |(_, one)| Ok(one))
    }

    /// The best within a budget where losses beyond those of one scheme for all, the largest that fits, count for
    /// more than is foreseen, and a weight may be given its scheme.
    fn with_doubt(&self, budget: Budget, doubt: f64, given: Option<(usize, Scheme)>) -> Result<Allocation> {
        let mut items = self.items.clone();
        if let Some((at, scheme)) = given {
            items[at].choices.retain(|c| c.scheme == scheme);
        }
        let limit = self.limit(budget);
        let fitting = self.candidates.iter().filter(|s| self.uniform(s).0 <= limit);
        if let Some(base) = fitting.max_by_key(|s| self.uniform(s).0) {
            for item in &mut items {
                let at = item.choices.iter().find(|c| c.scheme == *base).map_or(0.0, |c| c.loss);
                item.choices.iter_mut().for_each(|c| c.loss += (c.loss - at).max(0.0) * (doubt - 1.0));
            }
        }
        let room = limit.saturating_sub(self.fixed);
        if let Err(least) = choose(&mut items, room) {
            let least = least + self.fixed;
            let bits = bits(least, self.elements);
            bail!("the weights take {least} bytes at least, {bits:.2} bits each; {limit} bytes are allowed"; hint: "allow more, or quantize by a recipe of your own");
        }
        let chosen = || items.iter().map(|i| i.choices[i.chosen]);
        let foreseen = |(item, now): (&Item, &Item)| {
            let scheme = now.choices[now.chosen].scheme;
            item.choices.iter().find(|c| c.scheme == scheme).map_or(0.0, |c| c.loss)
        };
        let bytes = self.fixed + chosen().map(|c| c.bytes).sum::<u64>();
        let mut schemes = BTreeMap::new();
        for item in &items {
            for tensor in &item.tensors {
                schemes.entry(tensor.clone()).or_insert(item.choices[item.chosen].scheme);
            }
        }
        Ok(Allocation {
            loss: self.items.iter().zip(&items).map(foreseen).sum(),
            policy: Policy { smallest: self.smallest, ..policy(&items)? },
            schemes,
            measured: None,
            bytes,
            bits_per_weight: bits(bytes, self.elements),
        })
    }

    /// How large all weights may be, in bytes.
    fn limit(&self, budget: Budget) -> u64 {
        match budget {
            Budget::Bytes(bytes) => bytes,
            #[expect(
                clippy::cast_precision_loss,
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "a size in bytes"
            )]
            Budget::BitsPerWeight(bits) => (bits * self.elements as f64 / 8.0) as u64,
        }
    }

    /// What a scheme alone takes, in bytes of all weights, and costs; weights that do not take it stay.
    pub fn uniform(&self, scheme: &Scheme) -> (u64, f64) {
        let mut sum = (self.fixed, 0.0);
        for item in &self.items {
            let choice = item.choices.iter().find(|c| c.scheme == *scheme).or(item.choices.last());
            sum = choice.map_or(sum, |c| (sum.0 + c.bytes, sum.1 + c.loss));
        }
        sum
    }
}

#[expect(clippy::cast_precision_loss, reason = "a ratio that is shown")]
fn bits(bytes: u64, elements: u64) -> f64 {
    bytes as f64 * 8.0 / elements.max(1) as f64
}

/// The error of a weight of which nothing was measured counts as those of the others do in the mean.
fn estimate_unknown(items: &mut [Item]) {
    let known = items.iter().filter(|i| i.choices.iter().all(|c| c.loss.is_finite()));
    let sums = known.flat_map(|i| &i.choices).fold((0.0, 0.0), |s, c| (s.0 + c.loss, s.1 + c.error));
    let rate = if sums.1 > 0.0 { sums.0 / sums.1 } else { 1.0 };
    for item in items.iter_mut().filter(|i| i.choices.iter().any(|c| !c.loss.is_finite())) {
        item.choices.iter_mut().for_each(|c| c.loss = c.error * rate);
    }
}

/// Chooses within a size; where even the smallest choices are larger, gives their size.
fn choose(items: &mut Vec<Item>, limit: u64) -> std::result::Result<(), u64> {
    for item in items.iter_mut() {
        item.choices.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.loss.total_cmp(&b.loss)));
        // What is larger and no better is never chosen.
        let mut best = f64::INFINITY;
        item.choices.retain(|c| {
            c.loss < best && {
                best = c.loss;
                true
            }
        });
    }
    climb(items, limit)?;
    // A step of a weight that is a good part of all, such as the words, may leave too little for others.
    let loss = |items: &[Item]| items.iter().map(|i| i.choices[i.chosen].loss).sum::<f64>();
    let whole: u64 = items.iter().map(Item::largest).sum();
    let mut large: Vec<usize> = (0..items.len()).filter(|i| LARGE * items[*i].largest() >= whole).collect();
    large.sort_by_key(|i| Reverse(items[*i].largest()));
    for at in large {
        for choice in items[at].choices.clone() {
            let mut tried = items.clone();
            tried[at].choices = vec![choice];
            if climb(&mut tried, limit).is_ok() && loss(&tried) < loss(items) {
                *items = tried;
            }
        }
    }
    Ok(())
}

/// Starting from the smallest of each, takes the step that gains most for each byte until none fits.
fn climb(items: &mut [Item], limit: u64) -> std::result::Result<(), u64> {
    items.iter_mut().for_each(|i| i.chosen = 0);
    let mut size: u64 = items.iter().map(|i| i.choices[0].bytes).sum();
    if size > limit {
        return Err(size);
    }
    loop {
        let room = limit - size;
        let mut step: Option<(f64, usize, usize)> = None;
        for (at, item) in items.iter().enumerate() {
            let now = item.choices[item.chosen];
            for (next, choice) in item.choices.iter().enumerate().skip(item.chosen + 1) {
                let more = choice.bytes - now.bytes;
                #[expect(clippy::cast_precision_loss, reason = "a rate to compare")]
                let gain = (now.loss - choice.loss) / more.max(1) as f64;
                if more <= room && step.is_none_or(|s| gain > s.0) {
                    step = Some((gain, at, next));
                }
            }
        }
        let Some((_, at, next)) = step else { return Ok(()) };
        size += items[at].choices[next].bytes - items[at].choices[items[at].chosen].bytes;
        items[at].chosen = next;
    }
}

/// The recipe: the scheme of most is the default, all others are named.
fn policy(items: &[Item]) -> Result<Policy> {
    let mut counts: BTreeMap<String, (u64, Scheme)> = BTreeMap::new();
    for item in items {
        let choice = item.choices[item.chosen];
        let sum = counts.entry(choice.scheme.to_string()).or_insert((0, choice.scheme));
        sum.0 += item.names.len() as u64;
    }
    let Some((_, default)) = counts.values().max_by_key(|(n, _)| *n) else { bail!("there is no weight") };
    let mut policy = Policy::uniform(*default);
    let named = items.iter().flat_map(|i| i.names.iter().map(|name| (name, i.choices[i.chosen].scheme)));
    let mut named: Vec<(&String, Scheme)> = named.filter(|(_, scheme)| scheme != default).collect();
    named.sort_by_key(|(name, _)| *name);
    for (name, scheme) in named {
        policy.rules.push(Rule::new(Some(&escaped(name)), None, scheme).at(name)?);
    }
    Ok(policy)
}

/// The pattern that only this name fits.
fn escaped(name: &str) -> String {
    globset::escape(name)
}

impl Target {
    /// Those of some schemes that are worth it on the target.
    pub fn welcome(self, schemes: Vec<Scheme>) -> Vec<Scheme> {
        schemes.into_iter().filter(|s| self.refuse(s).is_ok()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(name: &str, choices: &[(u64, f64)]) -> Item {
        let choice = |(bytes, loss): &(u64, f64)| Choice {
            scheme: Scheme::Dense,
            bytes: *bytes,
            error: *loss,
            loss: *loss,
        };
        let choices = choices.iter().map(choice).collect();
        Item { names: [name.to_string()].into(), tensors: Vec::new(), choices, chosen: 0 }
    }

    fn cost(items: &[Item]) -> (u64, f64) {
        items.iter().map(|i| i.choices[i.chosen]).fold((0, 0.0), |s, c| (s.0 + c.bytes, s.1 + c.loss))
    }

    /// Against every combination there is: never over the limit, and near the best.
    #[test]
    fn choices_are_near_the_best_there_are() {
        let mut state = 7u32;
        let mut next = |n: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) % n
        };
        let (mut found, mut possible) = (0.0, 0.0);
        for _ in 0..40 {
            let mut items: Vec<Item> = (0..5)
                .map(|_| {
                    let size = 20 + next(30);
                    let weight = f64::from(next(100) + 1);
                    let choices =
                        [3u32, 4, 6, 8].map(|b| (u64::from(b * size), weight * 0.25f64.powi(b as i32)));
                    item("x", &choices)
                })
                .collect();
            let least: u64 = items.iter().map(|i| i.choices[0].bytes).sum();
            let limit = least + u64::from(next(600));
            let mut best = f64::INFINITY;
            for code in 0..4usize.pow(5) {
                for (i, item) in items.iter_mut().enumerate() {
                    item.chosen = code / 4usize.pow(i as u32) % 4;
                }
                let (size, loss) = cost(&items);
                if size <= limit {
                    best = best.min(loss);
                }
            }
            assert_eq!(choose(&mut items.clone(), least - 1), Err(least));
            choose(&mut items, limit).unwrap();
            let (size, loss) = cost(&items);
            assert!(size <= limit, "{size} {limit}");
            found += loss;
            possible += best;
        }
        assert!(found < 1.02 * possible, "{found} {possible}");
    }

    #[test]
    fn budgets_are_read() {
        assert_eq!("4.5bpw".parse::<Budget>().unwrap(), Budget::BitsPerWeight(4.5));
        assert_eq!("6".parse::<Budget>().unwrap(), Budget::BitsPerWeight(6.0));
        for bad in ["", "0bpw", "-1", "17bpw", "4.5MB", "NaN"] {
            let error = bad.parse::<Budget>().unwrap_err();
            assert_eq!(error.message(), format!("`{bad}` is no budget"));
        }
    }
}
