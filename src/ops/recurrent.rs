//! Recurrent layers.
//!
//! A sequence is `[S, B, I]`. Direction `reverse` gives its steps in the order they were computed in, last
//! element first; the second half of `bidirectional` is put back in the order of the sequence.

use candle_core::{Device, Tensor};

use super::{
    Args, BOOL, Call, Eval, FLOAT, Opset, Param, Preset, STRING, Spec, Tolerance, Val, args::named,
    linear::product, need, option, written,
};
use crate::{
    bail,
    error::Result,
    mil::{Dim, Type},
};

pub static SPECS: &[&Spec] = &[&LSTM, &GRU, &RNN];

static LSTM: Spec = recurrent(
    "lstm",
    &[
        need("x", FLOAT),
        need("initial_h", FLOAT),
        need("initial_c", FLOAT),
        super::fixed("weight_ih", FLOAT),
        super::fixed("weight_hh", FLOAT),
        option("bias", FLOAT),
        option("peephole", FLOAT),
        option("weight_ih_back", FLOAT),
        option("weight_hh_back", FLOAT),
        option("bias_back", FLOAT),
        option("peephole_back", FLOAT),
        written("direction", STRING, Preset::Str("forward")),
        written("output_sequence", BOOL, Preset::Bool(false)),
        written("recurrent_activation", STRING, Preset::Str("sigmoid")),
        written("cell_activation", STRING, Preset::Str("tanh")),
        written("activation", STRING, Preset::Str("tanh")),
        option("clip", FLOAT),
    ],
    |a| {
        check_direction(a, &["forward", "reverse", "bidirectional"])?;
        let both = a.str_or("direction", "forward") == "bidirectional";
        let hidden = check_weights(a, "", 4)?;
        if both && check_weights(a, "_back", 4)? != hidden {
            bail!("the two directions differ in their hidden size");
        }
        let [y, h] = results(a, if both { 2 } else { 1 }, hidden)?;
        if !matches!(a.tensor("initial_c")?.dims.as_slice(), [b, n] if agrees(&h, *b, *n)) {
            bail!("{} does not fit {h}", named("initial_c", a.tensor("initial_c")?));
        }
        Ok(vec![y, h.clone(), h])
    },
    lstm,
    4,
);

static GRU: Spec = recurrent(
    "gru",
    &[
        need("x", FLOAT),
        need("initial_h", FLOAT),
        super::fixed("weight_ih", FLOAT),
        super::fixed("weight_hh", FLOAT),
        option("bias", FLOAT),
        written("direction", STRING, Preset::Str("forward")),
        written("output_sequence", BOOL, Preset::Bool(false)),
        written("recurrent_activation", STRING, Preset::Str("sigmoid")),
        written("activation", STRING, Preset::Str("tanh")),
    ],
    |a| {
        check_direction(a, &["forward", "reverse"])?;
        Ok(results(a, 1, check_weights(a, "", 3)?)?.into())
    },
    gru,
    3,
);

static RNN: Spec = recurrent(
    "rnn",
    &[
        need("x", FLOAT),
        need("initial_h", FLOAT),
        super::fixed("weight_ih", FLOAT),
        super::fixed("weight_hh", FLOAT),
        option("bias", FLOAT),
        written("direction", STRING, Preset::Str("forward")),
        written("output_sequence", BOOL, Preset::Bool(false)),
        written("activation", STRING, Preset::Str("tanh")),
    ],
    |a| {
        check_direction(a, &["forward", "reverse"])?;
        Ok(results(a, 1, check_weights(a, "", 1)?)?.into())
    },
    rnn,
    1,
);

const fn recurrent(
    name: &'static str,
    params: &'static [Param],
    infer: fn(&Args<'_>) -> Result<Vec<Type>>,
    eval: fn(&Call<'_>) -> Result<Vec<Val>>,
    gates: u64,
) -> Spec {
    let flops: fn(&Args<'_>) -> u64 = match gates {
        4 => |a| work(a, 4),
        3 => |a| work(a, 3),
        _ => |a| work(a, 1),
    };
    Spec {
        name,
        since: Opset::Ios15,
        params,
        infer,
        eval: Eval::Call(eval),
        flops,
        tolerance: Tolerance::Rounding,
    }
}

fn work(a: &Args<'_>, gates: u64) -> u64 {
    let steps = a.dims("x").map_or(1, |d| d.iter().take(2).map(|n| n.fixed().unwrap_or(1) as u64).product());
    let weights = ["weight_ih", "weight_hh", "weight_ih_back", "weight_hh_back"];
    let weights: u64 = weights.iter().filter(|n| a.has(n)).map(|n| a.count(n)).sum();
    weights.saturating_mul(2).saturating_add(gates).saturating_mul(steps)
}

fn check_direction(a: &Args<'_>, possible: &[&str]) -> Result<()> {
    let direction = a.str_or("direction", "forward");
    if !possible.contains(&direction) {
        bail!("`direction` is `{direction}`"; hint: "{} are possible", possible.join(", "));
    }
    for name in ["recurrent_activation", "cell_activation", "activation"] {
        activation(a.str_or(name, "tanh")).map_err(|e| e.at(name))?;
    }
    Ok(())
}

/// The hidden size, from weights of so many gates each.
fn check_weights(a: &Args<'_>, suffix: &str, gates: usize) -> Result<Dim> {
    let x = a.tensor("x")?;
    let (ih, hh) = (a.tensor(&format!("weight_ih{suffix}"))?, a.tensor(&format!("weight_hh{suffix}"))?);
    let (&[_, _, input], &[rows, taken], &[all, hidden]) =
        (x.dims.as_slice(), ih.dims.as_slice(), hh.dims.as_slice())
    else {
        bail!(
            "{} wants rank 3, {} and {} rank 2",
            named("x", x),
            named("weight_ih", ih),
            named("weight_hh", hh)
        );
    };
    let times = hidden.fixed().map_or(Dim::ANY, |h| Dim::Fixed(h.saturating_mul(gates)));
    if !rows.agrees(times) || !all.agrees(times) {
        bail!(
            "{} and {} are not {gates} times {hidden} rows",
            named("weight_ih", ih),
            named("weight_hh", hh)
        );
    }
    if !input.agrees(taken) {
        bail!("{} has {input} features, {} takes {taken}", named("x", x), named("weight_ih", ih));
    }
    for (name, count) in [("bias", gates), ("peephole", 3)] {
        let name = format!("{name}{suffix}");
        let wanted = hidden.fixed().map_or(Dim::ANY, |h| Dim::Fixed(h.saturating_mul(count)));
        if a.has(&name) && !matches!(a.dims(&name)?, [n] if n.agrees(wanted)) {
            bail!("{} does not have {wanted} entries", named(&name, a.tensor(&name)?));
        }
    }
    Ok(hidden)
}

/// The sequence and the last state.
fn results(a: &Args<'_>, directions: usize, hidden: Dim) -> Result<[Type; 2]> {
    let x = a.tensor("x")?;
    let steps = if a.bool_or("output_sequence", false)? { x.dims[0] } else { Dim::Fixed(1) };
    let width = hidden.fixed().map_or(Dim::ANY, |h| Dim::Fixed(h.saturating_mul(directions)));
    let h = Type::tensor(x.dtype, [x.dims[1], width]);
    if !matches!(a.dims("initial_h")?, [b, n] if agrees(&h, *b, *n)) {
        bail!("{} does not fit {h}", named("initial_h", a.tensor("initial_h")?));
    }
    Ok([Type::tensor(x.dtype, [steps, x.dims[1], width]), h])
}

fn agrees(h: &Type, batch: Dim, width: Dim) -> bool {
    h.as_tensor().is_some_and(|t| t.dims[0].agrees(batch) && t.dims[1].agrees(width))
}

type Activation = fn(f32) -> f32;

fn activation(name: &str) -> Result<Activation> {
    Ok(match name {
        "tanh" | "scaled_tanh" => f32::tanh,
        "sigmoid" => |v| 1.0 / (1.0 + (-v).exp()),
        "hard_sigmoid" | "sigmoid_hard" => |v| (0.2 * v + 0.5).clamp(0.0, 1.0),
        "relu" => |v| v.max(0.0),
        "linear" => |v| v,
        other => {
            bail!("activation `{other}` is not known"; hint: "tanh, scaled_tanh, sigmoid, hard_sigmoid, relu and linear are possible")
        }
    })
}

/// One direction of a layer, at hand as plain numbers.
struct Layer {
    /// `[S · B, gates · H]`: the inputs through their weights, bias added.
    inputs: Vec<f32>,
    weight_hh: Tensor,
    peephole: Option<Vec<f32>>,
    steps: usize,
    batch: usize,
    hidden: usize,
    gates: usize,
    backwards: bool,
}

impl Layer {
    fn read(c: &Call<'_>, suffix: &str, gates: usize, backwards: bool) -> Result<Layer> {
        let x = c.tensor("x")?;
        let (steps, batch, input) = x.dims3()?;
        let (ih, hh) = (c.tensor(&format!("weight_ih{suffix}"))?, c.tensor(&format!("weight_hh{suffix}"))?);
        let (rows, hidden) = hh.dims2()?;
        if hidden == 0 || rows != hidden.saturating_mul(gates) || ih.dims() != [rows, input] {
            bail!("weights {:?} and {:?} do not fit {input} features in {gates} gates", ih.dims(), hh.dims());
        }
        let mut inputs = product(&x.contiguous()?.reshape((steps * batch, input))?, &ih.t()?)?;
        let bias = format!("bias{suffix}");
        if c.has(&bias) {
            inputs = inputs.broadcast_add(c.tensor(&bias)?)?;
        }
        let peephole = format!("peephole{suffix}");
        let peephole = if c.has(&peephole) { Some(c.get(&peephole)?.to_floats()?) } else { None };
        if peephole.as_ref().is_some_and(|p| p.len() != 3 * hidden) {
            bail!("`peephole` does not have {} entries", 3 * hidden);
        }
        let inputs = inputs.flatten_all()?.to_vec1()?;
        Ok(Layer { inputs, weight_hh: hh.clone(), peephole, steps, batch, hidden, gates, backwards })
    }

    /// Step `n` of the computation, as an index into the sequence.
    fn at(&self, n: usize) -> usize {
        if self.backwards { self.steps - 1 - n } else { n }
    }

    /// A row of inputs through their weights.
    fn input(&self, n: usize, b: usize) -> &[f32] {
        let width = self.gates * self.hidden;
        &self.inputs[(self.at(n) * self.batch + b) * width..][..width]
    }

    /// `[B, rows]`: the state through a range of rows of its weights.
    fn recur(&self, h: &[f32], first: usize, gates: usize) -> Result<Vec<f32>> {
        let h = Tensor::from_slice(h, (self.batch, self.hidden), &Device::Cpu)?;
        let w = self.weight_hh.narrow(0, first * self.hidden, gates * self.hidden)?;
        Ok(product(&h, &w.t()?)?.flatten_all()?.to_vec1()?)
    }

    fn state(&self, c: &Call<'_>, name: &str, half: usize) -> Result<Vec<f32>> {
        let t = c.tensor(name)?;
        let part = t.narrow(1, half * self.hidden, self.hidden)?;
        if part.dims() != [self.batch, self.hidden] {
            bail!("`{name}` is {:?}, a batch of {} is expected", t.dims(), self.batch);
        }
        Ok(part.flatten_all()?.to_vec1()?)
    }
}

/// All steps of a direction in the order they were computed, `[S, B, H]`, and its last cell state.
type Run = (Vec<Vec<f32>>, Vec<f32>);

fn lstm(c: &Call<'_>) -> Result<Vec<Val>> {
    match c.str_or("direction", "forward") {
        "bidirectional" => {
            let there = Layer::read(c, "", 4, false)?;
            let back = Layer::read(c, "_back", 4, true)?;
            if there.hidden != back.hidden {
                bail!("the two directions differ in their hidden size");
            }
            let (one, two) = (lstm_run(c, &there, 0)?, lstm_run(c, &back, 1)?);
            let h = [last(c, &there, &one.0, 0)?, last(c, &back, &two.0, 1)?];
            let mut steps = [one.0, two.0];
            if c.bool_or("output_sequence", false)? {
                steps[1].reverse();
            }
            finish(c, &there, &steps, &h, Some(&[one.1, two.1]))
        }
        direction => {
            let layer = Layer::read(c, "", 4, direction == "reverse")?;
            let (steps, cell) = lstm_run(c, &layer, 0)?;
            let h = [last(c, &layer, &steps, 0)?];
            finish(c, &layer, &[steps], &h, Some(&[cell]))
        }
    }
}

fn lstm_run(c: &Call<'_>, l: &Layer, half: usize) -> Result<Run> {
    let [gate, cell, out] =
        [("recurrent_activation", "sigmoid"), ("cell_activation", "tanh"), ("activation", "tanh")]
            .map(|(name, default)| activation(c.str_or(name, default)));
    let (gate, cell, out) = (gate?, cell?, out?);
    let clip = c.float_or("clip", f32::INFINITY)?.abs();
    let (mut h, mut state) = (l.state(c, "initial_h", half)?, l.state(c, "initial_c", half)?);
    let n = l.hidden;
    let peep = |k: usize, i: usize| l.peephole.as_ref().map_or(0.0, |p| p[k * n + i]);
    let mut steps = Vec::with_capacity(l.steps);
    for step in 0..l.steps {
        let through = l.recur(&h, 0, 4)?;
        for b in 0..l.batch {
            let (x, r) = (l.input(step, b), &through[b * 4 * n..][..4 * n]);
            for i in 0..n {
                let sum = |k: usize| x[k * n + i] + r[k * n + i];
                let old = state[b * n + i];
                let (input, forget) = (gate(sum(0) + peep(0, i) * old), gate(sum(1) + peep(1, i) * old));
                let new = (forget * old + input * cell(sum(3))).max(-clip).min(clip);
                state[b * n + i] = new;
                h[b * n + i] = gate(sum(2) + peep(2, i) * new) * out(new);
            }
        }
        steps.push(h.clone());
    }
    Ok((steps, state))
}

fn gru(c: &Call<'_>) -> Result<Vec<Val>> {
    let l = Layer::read(c, "", 3, c.str_or("direction", "forward") == "reverse")?;
    let gate = activation(c.str_or("recurrent_activation", "sigmoid"))?;
    let out = activation(c.str_or("activation", "tanh"))?;
    let mut h = l.state(c, "initial_h", 0)?;
    let n = l.hidden;
    let mut steps = Vec::with_capacity(l.steps);
    // The rows of the weights are reset, output, update.
    for step in 0..l.steps {
        let (reset, update) = (l.recur(&h, 0, 1)?, l.recur(&h, 2, 1)?);
        let at = |b: usize, k: usize, i: usize| l.input(step, b)[k * n + i];
        let kept: Vec<f32> = (0..h.len()).map(|j| h[j] * gate(at(j / n, 0, j % n) + reset[j])).collect();
        let new = l.recur(&kept, 1, 1)?;
        for (j, h) in h.iter_mut().enumerate() {
            let z = gate(at(j / n, 2, j % n) + update[j]);
            *h = (1.0 - z) * out(at(j / n, 1, j % n) + new[j]) + z * *h;
        }
        steps.push(h.clone());
    }
    let h = [last(c, &l, &steps, 0)?];
    finish(c, &l, &[steps], &h, None)
}

fn rnn(c: &Call<'_>) -> Result<Vec<Val>> {
    let l = Layer::read(c, "", 1, c.str_or("direction", "forward") == "reverse")?;
    let out = activation(c.str_or("activation", "tanh"))?;
    let mut h = l.state(c, "initial_h", 0)?;
    let mut steps = Vec::with_capacity(l.steps);
    for step in 0..l.steps {
        let through = l.recur(&h, 0, 1)?;
        for (j, h) in h.iter_mut().enumerate() {
            *h = out(l.input(step, j / l.hidden)[j % l.hidden] + through[j]);
        }
        steps.push(h.clone());
    }
    let h = [last(c, &l, &steps, 0)?];
    finish(c, &l, &[steps], &h, None)
}

/// The state after the last step, the initial one of an empty sequence.
fn last(c: &Call<'_>, l: &Layer, steps: &[Vec<f32>], half: usize) -> Result<Vec<f32>> {
    steps.last().map_or_else(|| l.state(c, "initial_h", half), |h| Ok(h.clone()))
}

/// Puts the directions side by side.
fn finish(
    c: &Call<'_>,
    l: &Layer,
    steps: &[Vec<Vec<f32>>],
    h: &[Vec<f32>],
    cell: Option<&[Vec<f32>]>,
) -> Result<Vec<Val>> {
    let beside = |parts: &[&Vec<f32>]| -> Vec<f32> {
        (0..l.batch)
            .flat_map(|b| parts.iter().flat_map(move |p| p[b * l.hidden..][..l.hidden].to_vec()))
            .collect()
    };
    let width = steps.len() * l.hidden;
    let state =
        |parts: &[Vec<f32>]| Val::floats(beside(&parts.iter().collect::<Vec<_>>()), &[l.batch, width]);
    let y = if c.bool_or("output_sequence", false)? {
        let all =
            (0..l.steps).flat_map(|s| beside(&steps.iter().map(|d| &d[s]).collect::<Vec<_>>())).collect();
        Val::floats(all, &[l.steps, l.batch, width])?
    } else {
        Val::floats(beside(&h.iter().collect::<Vec<_>>()), &[1, l.batch, width])?
    };
    let mut results = vec![y, state(h)?];
    if let Some(cell) = cell {
        results.push(state(cell)?);
    }
    Ok(results)
}
