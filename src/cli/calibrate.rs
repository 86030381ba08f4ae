//! What `convert` learns from a text before it compresses weights, and how it chooses schemes by it.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::{
    compress::{self, HEADING},
    write_beside,
};
use crate::{
    bail,
    checkpoint::Checkpoint,
    error::{Result, io},
    mil::{DType, Program, Weight, constant::encode_floats},
    ops::Opset,
    quant::{self, Allocation, Budget, Calibration, Choices, Inputs, Method, Policy, Trial},
    reference::{Decoder, Divisors, Given, Wanted, observe_by_layer},
    ui,
};

/// Tokens of a row of calibration text.
const ROW: usize = 512;
/// Tokens by which schemes are chosen; nothing else is learnt from them.
const HELD: usize = 1024;
/// Of those, tokens on which it is measured what rounding each weight costs.
const MEASURED: usize = 256;
/// Of so many predictions one is compared.
const EVERY: usize = 2;

#[derive(clap::Args)]
pub(super) struct Calibrating {
    /// A text to calibrate a language model's quantization on
    #[arg(long, value_name = "TEXT", help_heading = HEADING)]
    calibrate: Option<PathBuf>,
    /// Tokens of the text that are learnt from; a budget takes up to 1,024 more to choose by
    #[arg(long, value_name = "N", default_value_t = 4096, requires = "calibrate", help_heading = HEADING)]
    calibrate_tokens: usize,
    /// Weigh errors by the mean squares of what they are multiplied by; done when nothing else is asked for
    #[arg(long, requires = "calibrate", conflicts_with = "gptq", help_heading = HEADING)]
    importance: bool,
    /// Also let columns make up for the rounding of those before them
    #[arg(long, requires = "calibrate", help_heading = HEADING)]
    gptq: bool,
    /// Move what makes activations uneven into the weights that multiply them: a share of 0 moves nothing of it,
    /// 1 all of it, 0.5 is usual
    #[arg(long, value_name = "ALPHA", requires = "calibrate", value_parser = share, help_heading = HEADING)]
    smooth: Option<f32>,
    /// Choose a scheme for each weight so that all take so many bits a weight, as in `4.5bpw`: by what rounding does
    /// to predictions for a text, or by the errors of weights alone
    #[arg(long, value_name = "BITS", conflicts_with_all = ["quantize", "max_size"], help_heading = HEADING)]
    budget: Option<Budget>,
    /// Choose a scheme for each weight so that all weights are no larger
    #[arg(long, value_name = "SIZE", conflicts_with = "quantize", value_parser = super::convert::byte_size, help_heading = HEADING)]
    max_size: Option<u64>,
    /// Write down the recipe that was used
    #[arg(long, value_name = "FILE.toml", help_heading = HEADING)]
    write_recipe: Option<PathBuf>,
    /// A text whose perplexity is measured before and after, as far as the context goes
    #[arg(long, value_name = "TEXT", help_heading = HEADING)]
    pub(super) text: Option<PathBuf>,
}

impl Calibrating {
    pub(super) fn asked(&self) -> bool {
        self.calibrate.is_some()
    }

    pub(super) fn budget(&self) -> Option<Budget> {
        self.budget.or(self.max_size.map(Budget::Bytes))
    }

    /// The share of activations' unevenness that moves into weights.
    pub(super) fn smooth(&self) -> Option<f32> {
        self.smooth
    }

    /// The text in rows, for the reference; what is learnt of it is kept in a file in `folder`.
    pub(super) fn open<'a>(&self, checkpoint: &'a Checkpoint, folder: &Path) -> Result<Option<Lessons<'a>>> {
        let Some(file) = &self.calibrate else { return Ok(None) };
        Decoder::refuse_others(checkpoint)
            .map_err(|e| e.hint("only language models can be calibrated; leave out `--calibrate`"))?;
        let (rows, held) = rows(checkpoint, file, self.calibrate_tokens, self.budget().is_some())?;
        let tokens: usize = rows.iter().map(Vec::len).sum();
        ui::talk(format!("  calibrating on {} tokens of {}", ui::count(tokens as u64), file.display()));
        Ok(Some(Lessons { checkpoint, decoder: None, rows, held, folder: folder.into() }))
    }

    /// Runs the text through the reference; inputs that smoothing divides are looked at divided.
    pub(super) fn learn(
        &self,
        lessons: &mut Lessons<'_>,
        divisors: &Divisors,
        opset: Opset,
    ) -> Result<Arc<Calibration>> {
        let method = if self.gptq { Method::Feedback } else { Method::Importance };
        // Outputs are compared where schemes are chosen, which takes all products of inputs.
        let whole = self.gptq || self.budget().is_some();
        let wanted = if whole { Wanted::Hessians } else { Wanted::Moments };
        let mut kept = Kept::new(&lessons.folder)?;
        let mut inputs = BTreeMap::new();
        lessons.observe(wanted, divisors, |given| {
            inputs.extend(shared(given, &mut kept)?);
            Ok(())
        })?;
        let mut calibration = Calibration { method, inputs, costs: BTreeMap::new() };
        if self.budget().is_some() {
            let row = lessons.held[0][..lessons.held[0].len().min(MEASURED)].to_vec();
            let decoder = lessons.decoder()?;
            let (weights, probes) = (decoder.weights().len(), quant::probes(opset)?);
            ui::talk(format!("  measuring what rounding each of {weights} weights costs"));
            let mut done = 0;
            calibration.learn_costs(&probes, |tried| {
                let mut counted = |name: &str, values: &[f32], shape, looked_up| {
                    done += 1;
                    ui::progress(done, weights * probes.len(), "trials");
                    tried(name, values, shape, looked_up)
                };
                decoder.costs(&row, EVERY, &mut divided(divisors, &mut counted))
            })?;
        }
        Ok(Arc::new(calibration))
    }

    /// The recipe that a budget asks for, by what was learnt if anything was.
    pub(super) fn choose(
        &self,
        learnt: Option<(&mut Lessons<'_>, &Arc<Calibration>)>,
        programs: &[&Program],
        opset: Opset,
        options: quant::Options,
        divisors: &Divisors,
    ) -> Result<Option<Policy>> {
        let Some(budget) = self.budget() else { return Ok(None) };
        let choices =
            compress::choices(programs, opset, quant::SMALLEST, options, learnt.as_ref().map(|l| l.1))?;
        let chosen = match learnt {
            Some((lessons, calibration)) => nearest(&choices, budget, lessons, calibration, divisors)?,
            None => choices.within(budget)?,
        };
        ui::talk(compress::chosen(&chosen));
        Ok(Some(chosen.policy))
    }

    pub(super) fn write_recipe(&self, policy: Option<&Policy>) -> Result<()> {
        match (&self.write_recipe, policy) {
            (None, _) => Ok(()),
            (Some(file), Some(policy)) => write_beside(file, policy.text()?.as_bytes()),
            (Some(file), None) => {
                bail!("{}: nothing is quantized, so there is no recipe", file.display(); hint: "`--quantize` or `--budget` makes one")
            }
        }
    }
}

/// Tokens of several stretches of a text.
type Rows = Vec<Vec<u32>>;

/// What is learnt from.
pub(super) struct Lessons<'a> {
    checkpoint: &'a Checkpoint,
    /// The whole model, where it is run again and again.
    decoder: Option<Decoder>,
    rows: Rows,
    /// Rows that are not among the others, where schemes are chosen.
    held: Rows,
    folder: PathBuf,
}

impl Lessons<'_> {
    /// The largest magnitudes that the text gives the channels of each layer.
    pub(super) fn largest(&self) -> Result<BTreeMap<String, Arc<Vec<f32>>>> {
        let mut all = BTreeMap::new();
        self.observe(Wanted::Moments, &Divisors::new(), |given| {
            all.extend(given.into_iter().map(|(name, g)| (name, Arc::new(g.largest.clone()))));
            Ok(())
        })?;
        Ok(all)
    }

    fn observe(
        &self,
        wanted: Wanted,
        divisors: &Divisors,
        mut each: impl FnMut(BTreeMap<String, Arc<Given>>) -> Result<()>,
    ) -> Result<()> {
        observe_by_layer(self.checkpoint, &self.rows, wanted, divisors, |done, steps, observed| {
            ui::progress(done, steps, "steps of calibration");
            each(observed.given)
        })
    }

    fn decoder(&mut self) -> Result<&mut Decoder> {
        let decoder = match self.decoder.take() {
            Some(decoder) => decoder,
            None => Decoder::open(self.checkpoint)?,
        };
        Ok(self.decoder.insert(decoder))
    }
}

/// The choice with which the reference's predictions for what was held back diverge least.
fn nearest(
    choices: &Choices,
    budget: Budget,
    lessons: &mut Lessons<'_>,
    calibration: &Calibration,
    divisors: &Divisors,
) -> Result<Allocation> {
    let held = lessons.held.clone();
    let decoder = lessons.decoder()?;
    let (weights, mut changed, mut made) = (decoder.weights(), decoder.clone(), BTreeMap::new());
    choices.nearest(budget, |tried| {
        for (i, (name, shape)) in weights.iter().enumerate() {
            ui::progress(i + 1, weights.len(), "weights of a choice compressed");
            let Some(scheme) = tried.scheme(name).filter(|s| made.get(name) != Some(*s)) else { continue };
            let mut compress = |name: &str, values: &[f32], shape, looked_up| {
                calibration.compressed(name, values, shape, looked_up, scheme)
            };
            let (values, looked_up) = (decoder.weight(name)?, decoder.looks_up(name));
            let new = divided(divisors, &mut compress)(name, &values, *shape, looked_up)?;
            changed.replace(name, new)?;
            made.insert(name.clone(), *scheme);
        }
        decoder.divergence(&changed, &held, EVERY)
    })
}

/// A share, from 0 to 1.
fn share(text: &str) -> std::result::Result<f32, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a number from 0 to 1 is expected, such as 0.5".into()),
    }
}

/// A text's tokens in rows that the model takes, and others that are held back where that is asked for.
fn rows(checkpoint: &Checkpoint, file: &Path, tokens: usize, hold: bool) -> Result<(Rows, Rows)> {
    let text = std::fs::read_to_string(file).map_err(|e| io(file, &e))?;
    let tokenizer = checkpoint.tokenizer()?;
    let longest = checkpoint.config.opt_usize(&["max_position_embeddings", "n_positions"])?.unwrap_or(ROW);
    let all = tokenizer.encode(&text)?.ids.len();
    // Of a short text, a fifth can be held back.
    let row = ROW.min(longest).min(all / 5).max(2);
    let rows = tokenizer.encode_rows(&text, row)?.into_iter().map(|e| e.ids);
    let mut taught: Rows = rows.filter(|row| row.len() > 1).collect();
    let learnt = tokens.div_ceil(row).min(taught.len().saturating_sub(usize::from(hold)));
    let held = taught.split_off(learnt).into_iter().take(if hold { HELD.div_ceil(row) } else { 0 });
    if let Some(last) = taught.last_mut() {
        last.truncate(tokens.saturating_sub((learnt - 1) * row));
    }
    if taught.iter().all(|row| row.len() < 2) {
        bail!("{}: {} tokens are no text to calibrate on", file.display(), all.min(tokens));
    }
    Ok((taught, held.collect()))
}

/// Weights as smoothing makes them before they are compressed, and back.
fn divided<'a>(
    divisors: &'a Divisors,
    trial: &'a mut Trial<'_>,
) -> impl FnMut(&str, &[f32], [usize; 2], bool) -> Result<Vec<f32>> + 'a {
    move |name, values, shape, looked_up| {
        let Some(by) = divisors.get(name).filter(|by| by.len() == shape[1]) else {
            return trial(name, values, shape, looked_up);
        };
        let by = || by.iter().cycle();
        let values: Vec<f32> = values.iter().zip(by()).map(|(v, by)| v * by).collect();
        let made = trial(name, &values, shape, looked_up)?;
        Ok(made.iter().zip(by()).map(|(v, by)| v / by).collect())
    }
}

/// Products of inputs, in a file that has no name and goes with the process.
struct Kept {
    folder: PathBuf,
    file: Arc<Mutex<File>>,
    written: u64,
}

impl Kept {
    fn new(folder: &Path) -> Result<Kept> {
        let file = tempfile::tempfile_in(folder).map_err(|e| io(folder, &e))?;
        Ok(Kept { folder: folder.into(), file: Arc::new(Mutex::new(file)), written: 0 })
    }

    /// A square that is read when it is needed.
    fn keep(&mut self, name: &str, values: &[f32], n: usize) -> Result<Weight> {
        let bytes = encode_floats(DType::F32, values)?;
        let (from, length) = (self.written, bytes.len());
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let at = move |file: &mut File| file.seek(SeekFrom::Start(from));
        at(&mut file).and_then(|_| file.write_all(&bytes)).map_err(|e| {
            io(&self.folder, &e).hint("products of inputs are kept there while the model is compressed")
        })?;
        self.written += length as u64;
        let (file, folder) = (self.file.clone(), self.folder.clone());
        Ok(Weight::new(format!("products of inputs of {name}"), DType::F32, [n, n], move || {
            let mut bytes = vec![0; length];
            let mut file = file.lock().unwrap_or_else(PoisonError::into_inner);
            at(&mut file).and_then(|_| file.read_exact(&mut bytes)).map_err(|e| io(&folder, &e))?;
            Ok(bytes.into())
        }))
    }
}

/// What several layers are given is kept once.
fn shared(given: BTreeMap<String, Arc<Given>>, kept: &mut Kept) -> Result<BTreeMap<String, Arc<Inputs>>> {
    let mut known: Vec<(Arc<Given>, Arc<Inputs>)> = Vec::new();
    let mut all = BTreeMap::new();
    for (name, given) in given {
        let inputs = match known.iter().find(|(g, _)| Arc::ptr_eq(g, &given)) {
            Some((_, inputs)) => Arc::clone(inputs),
            None => {
                let n = given.moments.len();
                let hessian = given.hessian.as_ref().map(|h| kept.keep(&name, h, n)).transpose()?;
                let (moments, magnitudes) = (given.moments.clone(), given.magnitudes.clone());
                let inputs = Arc::new(Inputs { moments, hessian, magnitudes });
                known.push((given, Arc::clone(&inputs)));
                inputs
            }
        };
        all.insert(name, inputs);
    }
    Ok(all)
}
