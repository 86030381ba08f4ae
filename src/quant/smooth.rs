//! Smoothing: what makes activations uneven moves into the weights that multiply them, channel by channel.
//!
//! A norm's scale is divided by s and the columns of all layers that it feeds are multiplied by it, with
//! s = max|x|^α / max|W|^(1 − α) rounded to a power of two, so that in fp16 no number changes but its exponent
//! (SmoothQuant, arXiv:2211.10438). A norm whose output anything else reads is left, with the reason.
//! Where a layer's outputs are multiplied by something before other layers read them, as in a gated feed-forward block,
//! its rows are divided in the norm's place; of such factors only ratios matter, so all are moved to where weights of
//! 8 bits keep normal scales.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use sha2::{Digest, Sha256};

use super::calibration::tensors_of;
use crate::{
    bail,
    error::{Context, Result},
    mil::{Arg, Block, Const, Data, Function, Op, Program, TensorType, ValueId, Weight},
};

/// What was moved, and where nothing was.
#[derive(Debug, Default)]
pub struct Smoothing {
    pub smoothed: Vec<Smoothed>,
    /// Names of norms and products that stay as they are, and why.
    pub left: BTreeMap<String, String>,
    /// What the inputs of layers are divided by, by the checkpoint's names of their weights.
    pub divisors: BTreeMap<String, Arc<Vec<f32>>>,
}

/// A norm whose scale was divided, or a product of which the rows of one side were.
#[derive(Debug, Clone, PartialEq)]
pub struct Smoothed {
    pub name: String,
    pub product: bool,
    /// Weights that were multiplied.
    pub layers: usize,
    /// The least and the largest of what it was divided by.
    pub least: f32,
    pub largest: f32,
}

/// A norm or a product as one function has it, with what is divided and what it feeds, by the ids of constants.
struct Found {
    program: usize,
    function: String,
    name: String,
    feed: Feed,
}

/// What is divided, and the weights that are multiplied in return.
struct Feed {
    product: bool,
    channels: usize,
    scales: Vec<Scaled>,
    layers: Vec<ValueId>,
}

/// A constant of which some rows, of so many elements each, are divided.
#[derive(Clone, Copy)]
struct Scaled {
    id: ValueId,
    first: usize,
    inner: usize,
}

impl Scaled {
    /// The scale of a norm, or what is added to what it scaled.
    fn norm(id: ValueId) -> Scaled {
        Scaled { id, first: 0, inner: 1 }
    }
}

/// The same norm or product in all functions.
#[derive(Default)]
struct Group {
    found: Vec<Found>,
    scales: BTreeMap<String, (Weight, Scaled)>,
    layers: BTreeMap<String, Weight>,
}

impl Group {
    /// Keys of the weights that are divided and of those that are multiplied.
    fn keys(&self) -> impl Iterator<Item = &String> {
        self.scales.keys().chain(self.layers.keys())
    }
}

/// A constant: the program, the function and the value.
type Place = (usize, String, ValueId);

/// Exponents beyond which nothing is moved.
const MOST: i32 = 14;
/// The exponent that the largest of a layer's weights keeps, so that a scale of 8 bits stays a normal number.
const LEAST: i32 = -7;

/// Moves scales in programs that are parts of one model; `largest` has the largest magnitudes that a text gave
/// the channels of layers, by the checkpoint's names of their weights.
pub fn smooth(
    programs: &mut [&mut Program],
    largest: &BTreeMap<String, Arc<Vec<f32>>>,
    alpha: f32,
) -> Result<Smoothing> {
    if !(0.0..=1.0).contains(&alpha) {
        bail!("a share of {alpha} is to be moved"; hint: "a number from 0, nothing of activations, to 1, all of it, as in 0.5");
    }
    let mut done = Smoothing::default();
    let mut groups = groups(programs, &mut done.left);
    refuse_shared(programs, &mut groups, &mut done.left);
    let mut divided: HashMap<Place, (Scaled, Arc<Vec<f32>>)> = HashMap::new();
    let mut multiplied: HashMap<Place, Arc<Vec<f32>>> = HashMap::new();
    for group in groups.values() {
        let Some(first) = group.found.first() else { continue };
        let s = match factors_of(group, &first.feed, largest, alpha).at(&first.name)? {
            Ok(s) => Arc::new(s),
            Err(why) => {
                done.left.insert(first.name.clone(), why);
                continue;
            }
        };
        for key in group.layers.keys() {
            for name in tensors_of(key).unwrap_or_default() {
                done.divisors.insert(name.into(), s.clone());
            }
        }
        for f in &group.found {
            let place = |id: &ValueId| (f.program, f.function.clone(), *id);
            divided.extend(f.feed.scales.iter().map(|scaled| (place(&scaled.id), (*scaled, s.clone()))));
            multiplied.extend(f.feed.layers.iter().map(|id| (place(id), s.clone())));
        }
        done.smoothed.push(Smoothed {
            name: first.name.clone(),
            product: first.feed.product,
            layers: group.layers.len(),
            least: s.iter().copied().fold(f32::INFINITY, f32::min),
            largest: s.iter().copied().fold(0.0, f32::max),
        });
    }
    for (i, program) in programs.iter_mut().enumerate() {
        for (name, function) in &mut program.functions {
            function.body.walk_mut(&mut |op| {
                let ("const", [id]) = (op.kind.as_str(), op.outputs.as_slice()) else { return };
                let place = (i, name.clone(), *id);
                if let Some(Const { data: Data::Weight(w), .. }) = op.attrs.get_mut("val") {
                    // The rows of a layer that reads a norm may be divided for what reads the layer.
                    if let Some(s) = multiplied.get(&place) {
                        *w = multiply(w, s);
                    }
                    if let Some((scaled, s)) = divided.get(&place) {
                        *w = divide(w, *scaled, s);
                    }
                }
            });
        }
    }
    Ok(done)
}

/// The weight with its channels multiplied, along its second axis.
fn multiply(weight: &Weight, s: &Arc<Vec<f32>>) -> Weight {
    let inner: usize = weight.shape.iter().skip(2).product();
    let factors = s.clone();
    weight.map(&how("×", s), weight.dtype, weight.shape.clone(), move |mut values| {
        for (i, v) in values.iter_mut().enumerate() {
            *v *= factors[i / inner.max(1) % factors.len()];
        }
        Ok(values)
    })
}

/// The weight with some of its rows divided.
fn divide(weight: &Weight, Scaled { first, inner, .. }: Scaled, s: &Arc<Vec<f32>>) -> Weight {
    let factors = s.clone();
    let how = how(&format!("÷ from {first}"), s);
    weight.map(&how, weight.dtype, weight.shape.clone(), move |mut values| {
        let rows = values.chunks_mut(inner.max(1)).skip(first);
        rows.zip(factors.iter()).for_each(|(row, s)| row.iter_mut().for_each(|v| *v /= s));
        Ok(values)
    })
}

fn how(what: &str, s: &[f32]) -> String {
    let digest = Sha256::digest(s.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    let digest: String = digest.iter().take(8).map(|b| format!("{b:02x}")).collect();
    format!("smoothed {what} {digest}")
}

/// Norms and products by the keys of what is divided, and the reasons of norms that cannot be smoothed.
fn groups(programs: &[&mut Program], left: &mut BTreeMap<String, String>) -> BTreeMap<String, Group> {
    let mut groups: BTreeMap<String, Group> = BTreeMap::new();
    for (i, program) in programs.iter().enumerate() {
        for (name, function) in &program.functions {
            let view = View::new(function);
            function.body.walk(&mut |op| {
                let feed = match op.kind.as_str() {
                    "layer_norm" => view.follow(op),
                    "mul" => match view.product(op) {
                        Some(feed) => Ok(feed),
                        None => return,
                    },
                    _ => return,
                };
                match feed {
                    Ok(feed) => {
                        let weight = |id: &ValueId| view.weights.get(id).map(|w| (*w).clone());
                        let scales: Vec<(String, (Weight, Scaled))> = feed
                            .scales
                            .iter()
                            .filter_map(|s| weight(&s.id).map(|w| (w.key.clone(), (w, *s))))
                            .collect();
                        let signature = scales.iter().map(|(key, _)| key.as_str()).collect::<Vec<_>>();
                        let group = groups.entry(signature.join(" & ")).or_default();
                        group.scales.extend(scales);
                        group
                            .layers
                            .extend(feed.layers.iter().filter_map(weight).map(|w| (w.key.clone(), w)));
                        let (function, name) = (name.clone(), op.name().to_string());
                        group.found.push(Found { program: i, function, name, feed });
                    }
                    Err(why) => drop(left.insert(op.name().into(), why)),
                }
            });
        }
    }
    groups
}

/// Leaves norms and products whose constants are read in another place too, where they would be other weights. What is
/// divided for one may be multiplied for another.
fn refuse_shared(
    programs: &[&mut Program],
    groups: &mut BTreeMap<String, Group>,
    left: &mut BTreeMap<String, String>,
) {
    let mut readers: BTreeMap<&str, usize> = BTreeMap::new();
    for function in programs.iter().flat_map(|p| p.functions.values()) {
        function.body.walk(&mut |op| {
            if let Some(Const { data: Data::Weight(w), .. }) = op.constant() {
                *readers.entry(&w.key).or_default() += 1;
            }
        });
    }
    loop {
        let mut owners: BTreeMap<(&str, bool), BTreeSet<&str>> = BTreeMap::new();
        for (signature, group) in groups.iter() {
            let all = group.scales.keys().map(|key| (key, true));
            for (key, divided) in all.chain(group.layers.keys().map(|key| (key, false))) {
                owners.entry((key, divided)).or_default().insert(signature);
            }
        }
        let odd = |group: &Group, key: &String| {
            let places = group.found.iter().filter(|f| f.holds(programs, key)).count();
            let owned = |divided| owners.get(&(key.as_str(), divided)).map_or(0, BTreeSet::len);
            readers.get(key.as_str()) != Some(&places) || owned(true) > 1 || owned(false) > 1
        };
        let bad = groups.iter().find_map(|(signature, group)| {
            let key = group.keys().find(|key| odd(group, key))?;
            Some((signature.clone(), key.clone()))
        });
        let Some((signature, key)) = bad else { return };
        if let Some(found) = groups.remove(&signature).and_then(|g| g.found.into_iter().next()) {
            let name = tensors_of(&key).and_then(|n| n.first().map(|n| (*n).to_string())).unwrap_or(key);
            left.entry(found.name).or_insert_with(|| format!("`{name}` is read in another place too"));
        }
    }
}

impl Found {
    /// Whether a constant of this key is among its own.
    fn holds(&self, programs: &[&mut Program], key: &str) -> bool {
        let Some(function) = programs.get(self.program).and_then(|p| p.functions.get(&self.function)) else {
            return false;
        };
        let mut found = false;
        function.body.walk(&mut |op| {
            let [id] = op.outputs[..] else { return };
            if let Some(Const { data: Data::Weight(w), .. }) = op.constant() {
                let own = self.feed.layers.contains(&id) || self.feed.scales.iter().any(|s| s.id == id);
                found |= w.key == key && own;
            }
        });
        found
    }
}

/// Powers of two for the channels, or why there are none.
fn factors_of(
    group: &Group,
    Feed { product, channels, .. }: &Feed,
    largest: &BTreeMap<String, Arc<Vec<f32>>>,
    alpha: f32,
) -> Result<Result<Vec<f32>, String>> {
    let channels = *channels;
    let mut given = vec![0f32; channels];
    let mut known = false;
    for name in group.layers.keys().flat_map(|key| tensors_of(key).unwrap_or_default()) {
        let Some(seen) = largest.get(name) else { continue };
        if seen.len() != channels {
            return Ok(Err(format!("`{name}` has {} inputs in the reference, here {channels}", seen.len())));
        }
        given.iter_mut().zip(seen.iter()).for_each(|(g, s)| *g = g.max(*s));
        known = true;
    }
    if !known {
        return Ok(Err("the text taught nothing about the inputs of its layers".into()));
    }
    let mut weights = vec![0f32; channels];
    for weight in group.layers.values() {
        let inner: usize = weight.shape.iter().skip(2).product();
        for (i, v) in weight.floats()?.iter().enumerate() {
            let w = &mut weights[i / inner.max(1) % channels];
            *w = w.max(v.abs());
        }
    }
    // Scales stay normal numbers, and weights below what overflows.
    let (mut low, mut high) = (vec![-MOST; channels], vec![MOST; channels]);
    for (scale, Scaled { first, inner, .. }) in group.scales.values() {
        let values = scale.floats()?;
        for (i, row) in values.chunks((*inner).max(1)).skip(*first).take(channels).enumerate() {
            let most = row.iter().fold(0f32, |most, v| most.max(v.abs()));
            if most == 0.0 || !most.is_finite() {
                continue;
            }
            let exponent = exponent(most);
            let (least, most) = match (product, inner) {
                // What is subnormal already is left alone.
                (false, _) if exponent < -14 => (0, 0),
                (false, _) => (exponent - 15, exponent + 14),
                (true, 1) => (exponent - 15, MOST),
                (true, _) => (exponent - 15, exponent - LEAST),
            };
            low[i] = low[i].max(least);
            high[i] = high[i].min(most);
        }
    }
    let mut wanted = vec![None; channels];
    for (i, (x, w)) in given.iter().zip(&weights).enumerate() {
        if !(*x > 0.0 && *w > 0.0 && x.is_finite() && w.is_finite()) {
            continue;
        }
        high[i] = high[i].min(15 - exponent(*w));
        if *product {
            low[i] = low[i].max(LEAST - exponent(*w));
        }
        // Where no exponent does for all of them, nothing is moved.
        if low[i] <= high[i] {
            let alpha = f64::from(alpha);
            wanted[i] = Some(alpha * f64::from(*x).log2() - (1.0 - alpha) * f64::from(*w).log2());
        }
    }
    #[expect(clippy::cast_possible_truncation, reason = "an exponent")]
    let exponents = |by: i32| -> Vec<Option<i32>> {
        let one = |i: usize| Some(((wanted[i]? + f64::from(by)).round() as i32).clamp(low[i], high[i]));
        (0..channels).map(one).collect()
    };
    let off = |by: i32| -> f64 {
        let terms = exponents(by).into_iter().zip(&wanted);
        terms.filter_map(|(e, w)| Some((f64::from(e?) - (*w)? - f64::from(by)).abs())).sum()
    };
    let by = match product {
        true => (-MOST..=MOST).min_by(|a, b| off(*a).total_cmp(&off(*b)).then(a.abs().cmp(&b.abs()))),
        false => None,
    };
    Ok(Ok(exponents(by.unwrap_or(0)).into_iter().map(|e| e.map_or(1.0, |e| 2f32.powi(e))).collect()))
}

/// Of a finite number above zero in magnitude: the power of two that is no larger.
fn exponent(v: f32) -> i32 {
    let bits = v.abs().max(f32::MIN_POSITIVE).to_bits();
    i32::try_from(bits >> 23).unwrap_or(0) - 127
}

/// What reads each value of a function, and the weights among its constants.
struct View<'a> {
    function: &'a Function,
    readers: HashMap<ValueId, Vec<(&'a Op, &'a str)>>,
    /// What makes a value, and which of its results it is.
    makers: HashMap<ValueId, (&'a Op, usize)>,
    results: Vec<ValueId>,
    weights: HashMap<ValueId, &'a Weight>,
    constants: HashMap<ValueId, &'a Const>,
}

impl<'a> View<'a> {
    fn new(function: &'a Function) -> View<'a> {
        let mut view = View {
            function,
            readers: HashMap::new(),
            makers: HashMap::new(),
            results: Vec::new(),
            weights: HashMap::new(),
            constants: HashMap::new(),
        };
        view.block(&function.body);
        view
    }

    fn block(&mut self, block: &'a Block) {
        for op in &block.ops {
            for (param, args) in &op.params {
                for arg in args {
                    if let Arg::Value(id) = arg {
                        self.readers.entry(*id).or_default().push((op, param));
                    }
                }
            }
            self.makers.extend(op.outputs.iter().enumerate().map(|(i, id)| (*id, (op, i))));
            if let (Some(constant), [id]) = (op.constant(), op.outputs.as_slice()) {
                self.constants.insert(*id, constant);
                if let Data::Weight(w) = &constant.data {
                    self.weights.insert(*id, w);
                }
            }
            op.blocks.iter().for_each(|inner| self.block(inner));
        }
        self.results.extend(&block.outputs);
    }

    fn tensor(&self, id: ValueId) -> Result<&'a TensorType, String> {
        self.function.ty(id).as_tensor().ok_or_else(|| "it makes no tensor".into())
    }

    fn value(op: &Op, param: &str) -> Option<ValueId> {
        match op.params.get(param).map(Vec::as_slice) {
            Some([Arg::Value(id)]) => Some(*id),
            _ => None,
        }
    }

    fn ints(&self, op: &Op, param: &str) -> Option<Vec<i64>> {
        let constant = match op.params.get(param).map(Vec::as_slice)? {
            [Arg::Value(id)] => self.constants.get(id)?,
            [Arg::Const(c)] => c,
            _ => return None,
        };
        Some(constant.numbers().ok()?.into_ints())
    }

    /// A weight that only this op reads.
    fn own(&self, id: ValueId) -> Option<&'a Weight> {
        let alone = self.readers.get(&id).is_some_and(|r| r.len() == 1) && !self.results.contains(&id);
        self.weights.get(&id).copied().filter(|_| alone)
    }

    /// From a norm over channels on to the layers that read it.
    fn follow(&self, norm: &'a Op) -> Result<Feed, String> {
        if self.ints(norm, "axes").as_deref() != Some(&[1]) {
            return Err("it is not over the channels".into());
        }
        let [mut at] = norm.outputs[..] else { return Err("it has no single result".into()) };
        let mut scales = Vec::new();
        let mut scaled = false;
        for param in ["gamma", "beta"] {
            if let Some(id) = Self::value(norm, param) {
                self.own(id).ok_or(format!("its `{param}` is no weight of its own"))?;
                scales.push(Scaled::norm(id));
                scaled |= param == "gamma";
            }
        }
        loop {
            if self.results.contains(&at) {
                return Err("it is a result of the function".into());
            }
            let channels = self.channels(at)?;
            let readers = self.readers.get(&at).map_or(&[][..], Vec::as_slice);
            if !readers.is_empty() && readers.iter().all(|(op, p)| op.kind == "conv" && *p == "x") {
                let layers = self.layers(readers, channels)?;
                if !scaled {
                    return Err("it has no scale".into());
                }
                return Ok(Feed { product: false, channels, scales, layers });
            }
            let [(op, param)] = readers else {
                let other = readers.iter().find(|(op, _)| op.kind != "conv");
                let kind = other.map_or("nothing", |(op, _)| op.kind.as_str());
                return Err(format!("{kind} reads it, which is no linear layer"));
            };
            let [next] = op.outputs[..] else { return Err(format!("{} reads it", op.kind)) };
            match op.kind.as_str() {
                "slice_by_size" if self.ints(op, "begin").is_some_and(|b| b.get(1) == Some(&0)) => {}
                "mul" | "add" => {
                    let other = if *param == "x" { "y" } else { "x" };
                    let own = Self::value(op, other)
                        .filter(|id| self.own(*id).is_some_and(|w| w.shape == [1, channels, 1, 1]));
                    let Some(id) = own else {
                        return Err(format!("{} reads it, which is no linear layer", op.kind));
                    };
                    if op.kind == "mul" {
                        // What was added before is multiplied too.
                        scales.clear();
                        scaled = true;
                    }
                    scales.push(Scaled::norm(id));
                }
                kind => return Err(format!("{kind} reads it, which is no linear layer")),
            }
            at = next;
        }
    }

    /// From a product that only layers read back to a layer whose outputs, all or an equal share, are one side of it.
    fn product(&self, mul: &'a Op) -> Option<Feed> {
        let [at] = mul.outputs[..] else { return None };
        let channels = self.channels(at).ok().filter(|_| !self.results.contains(&at))?;
        let readers = self.readers.get(&at)?;
        if !readers.iter().all(|(op, p)| op.kind == "conv" && *p == "x") {
            return None;
        }
        let layers = self.layers(readers, channels).ok()?;
        let scales = ["y", "x"].into_iter().find_map(|side| self.rows(Self::value(mul, side)?, channels))?;
        Some(Feed { product: true, channels, scales, layers })
    }

    /// The rows of a layer's weight and bias that make a value which is read once.
    fn rows(&self, side: ValueId, channels: usize) -> Option<Vec<Scaled>> {
        let once = |id: &ValueId| {
            !self.results.contains(id) && self.readers.get(id).is_some_and(|readers| readers.len() == 1)
        };
        let mut maker = self.makers.get(&side).filter(|_| once(&side))?;
        let mut share = 0;
        // Shares of other sizes would begin elsewhere.
        let equal = maker.0.params.contains_key("num_splits");
        if maker.0.kind == "split" && equal && self.ints(maker.0, "axis").as_deref() == Some(&[1]) {
            share = maker.1;
            let whole = Self::value(maker.0, "x").filter(once)?;
            maker = self.makers.get(&whole)?;
        }
        let (conv, _) = *maker;
        if conv.kind != "conv" || self.ints(conv, "groups").is_some_and(|groups| groups != [1]) {
            return None;
        }
        let weight = Self::value(conv, "weight")?;
        let shape = &self.own(weight)?.shape;
        let first = share * channels;
        if shape.first().is_none_or(|rows| *rows < first + channels) || self.channels(side).ok()? != channels
        {
            return None;
        }
        let mut scales = vec![Scaled { id: weight, first, inner: shape.iter().skip(1).product() }];
        if conv.params.contains_key("bias") {
            let bias = Self::value(conv, "bias").filter(|id| self.own(*id).is_some())?;
            scales.push(Scaled { id: bias, first, inner: 1 });
        }
        Some(scales)
    }

    fn channels(&self, id: ValueId) -> Result<usize, String> {
        let shape = self.tensor(id)?.shape().ok_or("its size is not fixed")?;
        match shape[..] {
            [_, channels, _, _] => Ok(channels),
            _ => Err("it is not in the layout of convolutions".into()),
        }
    }

    fn layers(&self, readers: &[(&Op, &str)], channels: usize) -> Result<Vec<ValueId>, String> {
        let mut layers = Vec::new();
        for (op, _) in readers {
            let id = Self::value(op, "weight").filter(|id| self.weights.contains_key(id));
            let Some(id) = id else { return Err(format!("`{}` has no constant weight", op.name())) };
            let only = self.readers.get(&id).is_some_and(|all| {
                all.iter().all(|(op, p)| *p == "weight" && readers.iter().any(|(r, _)| std::ptr::eq(*r, *op)))
            });
            if !only || self.results.contains(&id) {
                return Err(format!("the weight of `{}` is read in another place too", op.name()));
            }
            if self.weights.get(&id).is_none_or(|w| w.shape.get(1) != Some(&channels)) {
                return Err(format!("`{}` does not sum over all channels", op.name()));
            }
            if !layers.contains(&id) {
                layers.push(id);
            }
        }
        Ok(layers)
    }
}
