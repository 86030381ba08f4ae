//! What a text taught about the inputs of linear layers, and what that means for the weights of a program.
//!
//! A weight's key begins with the checkpoint's name of the tensor that it is made from. Rows may be picked,
//! scaled and stacked on the way, which changes nothing about the inputs; columns may be spread over wider
//! heads, which is undone here; anything else does not fit and is left without a guide.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    encoded::{self, Encoded},
    feedback, forms,
    layout::Layout,
    scheme::Scheme,
};
use crate::{
    bail,
    error::Result,
    mil::{DType, Weight, constant::encode_floats},
};

/// What the layers that share it were given.
#[derive(Debug, Clone, Default)]
pub struct Inputs {
    /// The mean square of each input channel.
    pub moments: Vec<f32>,
    /// The mean product of every two input channels, `[channels, channels]`, read when it is needed.
    pub hessian: Option<Weight>,
    /// Magnitudes of inputs, in fp16, and how often each of them occurs.
    pub magnitudes: Vec<(f32, u64)>,
}

impl Inputs {
    /// With products that are kept in memory.
    pub fn new(moments: Vec<f32>, hessian: Option<Vec<f32>>, magnitudes: Vec<(f32, u64)>) -> Result<Inputs> {
        let n = moments.len();
        let kept = |products: Vec<f32>| -> Result<Weight> {
            if products.len() != n * n {
                bail!("{} products of inputs, there are {n} inputs", products.len());
            }
            let products = Arc::new(products);
            let bytes = move || Ok(encode_floats(DType::F32, &products)?.into());
            Ok(Weight::new("products of inputs", DType::F32, [n, n], bytes))
        };
        Ok(Inputs { moments, hessian: hessian.map(kept).transpose()?, magnitudes })
    }
}

/// How a weight's codes are chosen with what is known of its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// Errors count by the mean squares of the channels that they are multiplied by.
    Importance,
    /// Also, what rounding did to a column is made up for by those that come after it.
    Feedback,
}

impl Method {
    pub fn name(self) -> &'static str {
        ["importance", "gptq"][self as usize]
    }
}

/// By the checkpoint's names of weights.
#[derive(Debug, Clone)]
pub struct Calibration {
    pub method: Method,
    pub inputs: BTreeMap<String, Arc<Inputs>>,
    /// What errors of what each weight makes cost.
    pub costs: BTreeMap<String, Curve>,
}

/// By how many nats a token predictions diverge for relative errors of what a weight makes, as measured for some
/// errors. Between two of them the logarithms are on a line, beyond them cost is in proportion to error.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Curve {
    /// Errors, the smallest first, and nats.
    points: Vec<(f64, f64)>,
}

impl Curve {
    pub fn new(mut points: Vec<(f64, f64)>) -> Curve {
        points.retain(|(error, nats)| *error > 0.0 && error.is_finite() && *nats >= 0.0 && nats.is_finite());
        points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
        points.dedup_by_key(|p| p.0);
        Curve { points }
    }

    /// `None` where nothing was measured.
    pub fn nats(&self, error: f64) -> Option<f64> {
        let along = |(e, nats): (f64, f64)| nats * error / e;
        let above = self.points.partition_point(|(e, _)| *e <= error);
        match (above.checked_sub(1).map(|i| self.points[i]), self.points.get(above).copied()) {
            (Some((e0, n0)), Some((e1, n1))) if n0 > 0.0 && n1 > 0.0 => {
                Some(n0 * (n1 / n0).powf((error / e0).ln() / (e1 / e0).ln()))
            }
            (Some(_), Some(above)) => Some(along(above)),
            (Some(one), None) | (None, Some(one)) => Some(along(one)),
            (None, None) => None,
        }
    }
}

/// What is known of one weight.
#[derive(Debug, Clone)]
pub(super) struct Guide {
    method: Method,
    inputs: Arc<Inputs>,
    /// Channels of a head, and what they are padded to.
    spread: Option<(usize, usize)>,
    /// Rows are looked up too, where all channels count alike.
    looked_up: bool,
}

/// The share of a mean below which no channel's importance falls: a text shows only some of what will come.
const FLOOR: f32 = 1e-3;

impl Calibration {
    /// Refuses sizes that do not fit each other, and what is no mean of squares.
    pub(super) fn check(&self) -> Result<()> {
        for (name, Inputs { moments, hessian, magnitudes }) in self.inputs.iter().map(|(n, i)| (n, &**i)) {
            let n = moments.len();
            if let Some(hessian) = hessian.as_ref().filter(|h| h.shape != [n, n]) {
                bail!("`{name}`: {:?} products of inputs, there are {n} inputs", hessian.shape);
            }
            if let Some(bad) = moments.iter().find(|m| !(m.is_finite() && **m >= 0.0)) {
                bail!("`{name}`: a mean square of inputs is {bad}"; hint: "the text drives the model out of range, or its weights are damaged");
            }
            if let Some((bad, _)) = magnitudes.iter().find(|(m, _)| !(m.is_finite() && *m >= 0.0)) {
                bail!("`{name}`: a magnitude of inputs is {bad}"; hint: "the text drives the model out of range, or its weights are damaged");
            }
        }
        Ok(())
    }

    /// What is known of a weight with this many inputs, or why nothing is.
    pub(super) fn guide(&self, key: &str, width: usize, looked_up: bool) -> Result<Guide, String> {
        let Some(names) = tensors_of(key) else { return Err("it is made from no tensor".into()) };
        let mut found: Option<&Arc<Inputs>> = None;
        for name in &names {
            let Some(inputs) = self.inputs.get(*name) else {
                return Err(format!("the text taught nothing about the inputs of `{name}`"));
            };
            if found.is_some_and(|f| f.moments != inputs.moments) {
                return Err(format!("`{name}` is stacked on a layer with other inputs"));
            }
            found = Some(inputs);
        }
        let Some(inputs) = found else { return Err("it is made from no tensor".into()) };
        let known = inputs.moments.len();
        let spread = spread_of(key);
        let wide = match spread {
            Some((dim, padded)) if dim > 0 && known.is_multiple_of(dim) => known / dim * padded,
            _ => known,
        };
        if wide != width {
            return Err(format!("{width} inputs, those of the reference's layer are {known}"));
        }
        Ok(Guide { method: self.method, inputs: Arc::clone(inputs), spread, looked_up })
    }

    /// What a relative error of all that a weight makes costs, in nats a token.
    pub(super) fn cost(&self, key: &str, error: f64) -> Option<f64> {
        let known = |name: &&str| self.costs.get(*name)?.nats(error);
        let found: Vec<f64> = tensors_of(key)?.iter().filter_map(known).collect();
        (!found.is_empty()).then(|| found.into_iter().sum())
    }
}

/// Gives what shall be tried in the place of a weight of the reference: of its name, values `[out, in]`, and whether
/// its rows are looked up.
pub type Trial<'a> = dyn FnMut(&str, &[f32], [usize; 2], bool) -> Result<Vec<f32>> + 'a;

impl Calibration {
    /// Learns what relative errors cost, by those that some schemes make. `costs` puts what it is given in the place
    /// of each weight by itself, and tells how many nats a token the model's predictions diverge then.
    pub fn learn_costs(
        &mut self,
        schemes: &[Scheme],
        mut costs: impl FnMut(&mut Trial<'_>) -> Result<BTreeMap<String, f64>>,
    ) -> Result<()> {
        let mut points: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        for scheme in schemes {
            let mut errors = BTreeMap::new();
            let found = costs(&mut |name, values, shape, looked_up| {
                errors.insert(name.to_string(), self.error(name, values, shape, looked_up, scheme)?);
                self.compressed(name, values, shape, looked_up, scheme)
            })?;
            for (name, nats) in found {
                let error = errors.get(&name).copied();
                points.entry(name).or_default().extend(error.map(|e| (e, nats)));
            }
        }
        self.costs = points.into_iter().map(|(name, points)| (name, Curve::new(points))).collect();
        Ok(())
    }

    /// A tensor of the checkpoint `[out, in]`, compressed by what is known of its inputs and read back.
    pub fn compressed(
        &self,
        name: &str,
        values: &[f32],
        shape: [usize; 2],
        looked_up: bool,
        scheme: &Scheme,
    ) -> Result<Vec<f32>> {
        let layout = Layout { shape: &shape, output: 0, input: 1 };
        let encoded = match self.tried(name, shape, looked_up, scheme) {
            (scheme, Ok(guide)) => guide.encode(values, layout, &scheme)?,
            (scheme, Err(_)) => encoded::encode(values, layout, &scheme, None)?,
        };
        encoded.decode(layout)
    }

    /// The relative error of what a tensor of the checkpoint makes of its inputs, each code the nearest, by which
    /// schemes are compared.
    fn error(
        &self,
        name: &str,
        values: &[f32],
        shape: [usize; 2],
        looked_up: bool,
        scheme: &Scheme,
    ) -> Result<f64> {
        let layout = Layout { shape: &shape, output: 0, input: 1 };
        let (scheme, guide) = self.tried(name, shape, looked_up, scheme);
        let importance = guide.as_ref().ok().map(Guide::importance);
        let plain = encoded::encode(values, layout, &scheme, importance.as_deref())?;
        match guide {
            Ok(guide) => guide.loss(&of(name), &plain, values, layout, &guide.power(values, layout)?),
            Err(_) => Ok(plain.stats(values, layout)?.relative()),
        }
    }

    /// The form of a scheme that a tensor takes, and what is known of its inputs.
    fn tried(
        &self,
        name: &str,
        shape: [usize; 2],
        looked_up: bool,
        scheme: &Scheme,
    ) -> (Scheme, Result<Guide, String>) {
        (forms::fitted(scheme, &shape, 0, 1).0, self.guide(&of(name), shape[1], looked_up))
    }
}

/// The key of a tensor as it is.
fn of(name: &str) -> String {
    format!("ckpt:{name}")
}

/// The checkpoint's tensors that a weight is made from.
pub(super) fn tensors_of(key: &str) -> Option<Vec<&str>> {
    let part = |part| str::split(str::strip_prefix(part, "ckpt:")?, ' ').next();
    let names: Option<BTreeSet<&str>> = key.split(" & ").map(part).collect();
    Some(names?.into_iter().collect())
}

/// How many tensors are stacked.
pub(super) fn stacked(key: &str) -> usize {
    key.split(" & ").count()
}

/// `columns 24 of 32`: the channels of a head, and what they are padded to.
fn spread_of(key: &str) -> Option<(usize, usize)> {
    let (_, rest) = key.split_once("| columns ")?;
    let mut words = rest.split(' ');
    let dim = words.next()?.parse().ok()?;
    let padded = words.nth(1)?.parse().ok()?;
    (dim <= padded).then_some((dim, padded))
}

impl Guide {
    /// Compresses a weight by what is known of its inputs.
    pub(super) fn encode(&self, values: &[f32], layout: Layout<'_>, scheme: &Scheme) -> Result<Encoded> {
        let importance = self.importance();
        match (self.method, self.hessian()?) {
            (Method::Feedback, Some(hessian)) if feedback::takes(scheme, layout) => {
                feedback::encode(values, layout, scheme, &importance, &hessian)
            }
            _ => encoded::encode(values, layout, scheme, Some(&importance)),
        }
    }

    pub(super) fn inputs(&self) -> &Arc<Inputs> {
        &self.inputs
    }

    /// What is done to a weight of this scheme.
    pub(super) fn method(&self, scheme: &Scheme, layout: Layout<'_>) -> Method {
        match self.method {
            Method::Feedback if self.inputs.hessian.is_some() && feedback::takes(scheme, layout) => {
                Method::Feedback
            }
            _ => Method::Importance,
        }
    }

    /// One number for each input channel, 1 in the mean.
    pub(super) fn importance(&self) -> Vec<f32> {
        let moments = &self.inputs.moments;
        let mean = mean(moments.iter().copied());
        let one = |m: &f32| {
            let own = if mean > 0.0 { m / mean } else { 1.0 };
            (if self.looked_up { f32::midpoint(own, 1.0) } else { own }).max(FLOOR)
        };
        let tight: Vec<f32> = moments.iter().map(one).collect();
        let wide = self.wide();
        if tight.len() == wide.len() {
            return tight;
        }
        wide.into_iter().map(|from| from.map_or(FLOOR, |i| tight[i])).collect()
    }

    /// The products of inputs, 1 in the mean of squares.
    pub(super) fn hessian(&self) -> Result<Option<Vec<f32>>> {
        let Some(products) = &self.inputs.hessian else { return Ok(None) };
        let mut given = products.floats()?;
        if let Some(bad) = given.iter().find(|h| !h.is_finite()) {
            bail!("{}: a product of inputs is {bad}", products.key; hint: "the text drives the model out of range, or its weights are damaged");
        }
        let tight = self.inputs.moments.len();
        let mean = mean((0..tight).map(|i| given[i * tight + i]));
        let scale = if mean > 0.0 { mean.recip() } else { 1.0 };
        given.iter_mut().for_each(|v| *v *= scale);
        if self.looked_up {
            for (i, v) in given.iter_mut().enumerate() {
                *v = f32::midpoint(*v, if i / tight == i % tight { 1.0 } else { 0.0 });
            }
        }
        let wide = self.wide();
        let n = wide.len();
        if n == tight {
            return Ok(Some(given));
        }
        let mut out = vec![0.0; n * n];
        for (i, from) in wide.iter().enumerate() {
            let Some(row) = from else { continue };
            for (j, from) in wide.iter().enumerate() {
                let Some(column) = from else { continue };
                out[i * n + j] = given[row * tight + column];
            }
        }
        Ok(Some(out))
    }

    /// The reference's channel for each of the program's.
    fn wide(&self) -> Vec<Option<usize>> {
        let tight = self.inputs.moments.len();
        match self.spread {
            Some((dim, padded)) if dim > 0 => (0..tight / dim * padded)
                .map(|c| (c % padded < dim).then_some(c / padded * dim + c % padded))
                .collect(),
            _ => (0..tight).map(Some).collect(),
        }
    }

    /// The relative error of what a weight makes of its inputs: of all its outputs together, or the mean over
    /// outputs where they belong to several layers. Errors of one output's elements are taken as independent.
    pub(super) fn loss(
        &self,
        key: &str,
        encoded: &Encoded,
        values: &[f32],
        layout: Layout<'_>,
        power: &[f64],
    ) -> Result<f64> {
        let (outputs, inputs) = (layout.shape[layout.output], layout.shape[layout.input]);
        let importance = self.importance();
        if importance.len() != inputs || power.len() != outputs {
            bail!(
                "{} inputs and {} outputs are known of a weight {:?}",
                importance.len(),
                power.len(),
                layout.shape
            );
        }
        let decoded = encoded.decode(layout)?;
        let mut errors = vec![0f64; outputs];
        let (after_out, after_in) = (layout.after(layout.output), layout.after(layout.input));
        for (i, (x, y)) in values.iter().zip(&decoded).enumerate() {
            let off = f64::from(x - y);
            errors[i / after_out % outputs] += off * off * f64::from(importance[i / after_in % inputs]);
        }
        if stacked(key) == 1 {
            let whole: f64 = power.iter().sum();
            return Ok(if whole > 0.0 { errors.iter().sum::<f64>() / whole } else { 0.0 });
        }
        let real: Vec<f64> =
            errors.iter().zip(power).filter(|(_, p)| **p > 0.0).map(|(e, p)| e / p).collect();
        Ok(real.iter().sum::<f64>() / real.len().max(1) as f64)
    }

    /// The mean square of each output, in units of the mean square of an input.
    pub(super) fn power(&self, values: &[f32], layout: Layout<'_>) -> Result<Vec<f64>> {
        let (outputs, inputs) = (layout.shape[layout.output], layout.shape[layout.input]);
        match self.hessian()? {
            Some(hessian) if values.len() == outputs * inputs => feedback::powers(values, layout, &hessian),
            _ => {
                let importance = self.importance();
                let mut power = vec![0f64; outputs];
                let (after_out, after_in) = (layout.after(layout.output), layout.after(layout.input));
                for (i, x) in values.iter().enumerate() {
                    let weight = f64::from(importance[i / after_in % inputs]);
                    power[i / after_out % outputs] += f64::from(*x).powi(2) * weight;
                }
                Ok(power)
            }
        }
    }
}

fn mean(values: impl Iterator<Item = f32>) -> f32 {
    let (sum, n) = values.fold((0f64, 0u32), |(s, n), v| (s + f64::from(v), n + 1));
    (sum / f64::from(n.max(1))) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calibration() -> Calibration {
        let given = |moments: &[f32]| Arc::new(Inputs { moments: moments.to_vec(), ..Inputs::default() });
        let shared = given(&[1.0, 2.0, 3.0, 6.0]);
        let inputs = [("q", shared.clone()), ("k", shared), ("o", given(&[4.0, 4.0, 4.0, 4.0]))];
        Calibration {
            method: Method::Importance,
            inputs: inputs.map(|(n, i)| (n.to_string(), i)).into(),
            costs: [("q", 1.0), ("k", 2.0)].map(|(n, c)| (n.into(), Curve::new(vec![(0.1, 0.1 * c)]))).into(),
        }
    }

    #[test]
    fn weights_are_known_by_the_tensors_they_are_made_from() {
        let calibration = calibration();
        for (key, width, says) in [
            ("ckpt:q | fp16", 4, ""),
            ("ckpt:q rows 0..3 × 0.5 & ckpt:k rows 3..9 × 1 fp16", 4, ""),
            ("ckpt:o | columns 2 of 8 rows 0..4 × 1 fp16", 16, ""),
            (
                "ckpt:o | columns 2 of 8 rows 0..4 × 1 fp16",
                4,
                "4 inputs, those of the reference's layer are 4",
            ),
            ("ckpt:q & ckpt:o", 4, "`q` is stacked on a layer with other inputs"),
            ("ckpt:v | fp16", 4, "the text taught nothing about the inputs of `v`"),
            ("mask fp16", 4, "it is made from no tensor"),
            ("ckpt:q | fp16", 5, "5 inputs, those of the reference's layer are 4"),
        ] {
            match calibration.guide(key, width, false) {
                Ok(guide) => assert_eq!(("", guide.importance().len()), (says, width), "{key}"),
                Err(why) => assert_eq!(why, says, "{key}"),
            }
        }
        let cost = calibration.cost("ckpt:q rows 0 & ckpt:k rows 1", 0.5).unwrap();
        assert!((cost - 1.5).abs() < 1e-12, "{cost}");
        assert_eq!(calibration.cost("ckpt:v | fp16", 0.5), None);
    }

    #[test]
    fn costs_go_through_what_was_measured() {
        let curve = Curve::new(vec![(0.04, 0.8), (0.01, 0.1), (f64::NAN, 1.0), (0.0, 1.0)]);
        for (error, nats) in [(0.001, 0.01), (0.01, 0.1), (0.02, 0.08f64.sqrt()), (0.04, 0.8), (0.08, 1.6)] {
            let found = curve.nats(error).unwrap();
            assert!((found - nats).abs() < 1e-12, "{error}: {found} for {nats}");
        }
        // No logarithm of nothing.
        assert_eq!(Curve::new(vec![(0.01, 0.0), (0.04, 0.8)]).nats(0.02), Some(0.4));
        assert_eq!(Curve::default().nats(0.02), None);
    }

    #[test]
    fn importance_is_one_in_the_mean_and_follows_padded_heads() {
        let calibration = calibration();
        let plain = calibration.guide("ckpt:q | fp16", 4, false).unwrap();
        assert_eq!(plain.importance(), [1.0 / 3.0, 2.0 / 3.0, 1.0, 2.0]);
        let table = calibration.guide("ckpt:q | fp16", 4, true).unwrap();
        assert_eq!(
            table.importance(),
            [f32::midpoint(1.0 / 3.0, 1.0), f32::midpoint(2.0 / 3.0, 1.0), 1.0, 1.5]
        );
        let spread = calibration.guide("ckpt:o | columns 2 of 3 rows 0..4 × 1", 6, false).unwrap();
        assert_eq!(spread.importance(), [1.0, 1.0, FLOOR, 1.0, 1.0, FLOOR]);
    }
}
