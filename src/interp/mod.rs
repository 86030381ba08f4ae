//! Running any function of a program on the CPU.
//!
//! Every result is checked against its declared type and, in fp16, rounded to it: the arithmetic of a
//! device that accumulates in 32 bits. In fp32 nothing is rounded, so what is off is the graph's own error.

pub mod compare;
mod plan;
mod reuse;
mod settle;
mod states;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use candle_core::Tensor;
use plan::Plan;
pub use states::States;

use crate::{
    bail,
    error::{Context, Error, Result},
    mil::{Arg, Block, Const, DType, Data, Function, Op, Program, TensorType, Type, ValueId},
    ops::{self, Call, Eval, Val},
};

/// What floats are rounded to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// Each result, to its declared type.
    Fp16,
    /// The same, and what is subnormal in fp16 becomes zero, as on devices that flush it.
    Fp16Flush,
    /// Nothing is rounded.
    Fp32,
}

/// Sees each result as it is computed: the op, the name of the result, the value.
pub type Tap<'t> = &'t mut dyn FnMut(&Op, &str, &Val);

/// A program ready to run. Weights are decoded at their first use and kept.
pub struct Machine<'a> {
    program: &'a Program,
    precision: Precision,
    plans: BTreeMap<&'a str, Plan>,
    weights: HashMap<(String, DType, Vec<usize>), Val>,
    /// Results of constexpr ops.
    dense: HashMap<(&'a str, ValueId), Val>,
}

/// Rounds of one loop, beyond which it is taken to have no end.
const ROUNDS: usize = 10_000_000;

impl<'a> Machine<'a> {
    pub fn new(program: &'a Program, precision: Precision) -> Self {
        let plans = program.functions.iter().map(|(name, f)| (name.as_str(), Plan::of_function(f))).collect();
        Self { program, precision, plans, weights: HashMap::new(), dense: HashMap::new() }
    }

    /// The states of a function, all zero.
    pub fn states(&self, function: &str) -> Result<States> {
        let (name, function) = self.function(function)?;
        States::zeros(function).at(name)
    }

    /// Names of a function's inputs, states left out.
    pub fn inputs(&self, function: &str) -> Result<Vec<String>> {
        let (_, function) = self.function(function)?;
        let inputs = function.inputs.iter().map(|id| function.value(*id));
        Ok(inputs.filter(|v| v.ty.as_state().is_none()).map(|v| v.name.clone()).collect())
    }

    /// Runs a function; a function without states takes `States::default()`.
    pub fn run<'t>(
        &mut self,
        function: &str,
        inputs: &BTreeMap<String, Val>,
        states: &'t mut States,
        tap: Option<Tap<'t>>,
    ) -> Result<BTreeMap<String, Val>> {
        let (name, function) = self.function(function)?;
        let values = vec![None; function.values.len()];
        let mut frame = Frame { name, function, values, states, tap, shared: BTreeSet::new() };
        self.take_inputs(&mut frame, inputs).at(name)?;
        // The plan is put back whatever happens, so that the machine can be used again.
        let plan = self.plans.remove(name).unwrap_or_default();
        // A tap may keep what it sees.
        let states =
            function.inputs.iter().filter(|id| frame.tap.is_some() || plan.reuse.exposed.contains(id));
        frame.shared = states.map(|id| function.name(*id)).collect();
        let outputs = self.run_block(&mut frame, &function.body, &plan);
        self.plans.insert(name, plan);
        let names = function.body.outputs.iter().map(|id| function.name(*id).to_string());
        Ok(names.zip(outputs?).collect())
    }

    fn function(&self, name: &str) -> Result<(&'a str, &'a Function)> {
        match self.program.functions.get_key_value(name) {
            Some((name, function)) => Ok((name, function)),
            None => {
                let names: Vec<&str> = self.program.functions.keys().map(String::as_str).collect();
                bail!("the program has no function `{name}`"; hint: "it has {}", names.join(", "))
            }
        }
    }

    fn take_inputs(&self, frame: &mut Frame<'a, '_>, given: &BTreeMap<String, Val>) -> Result<()> {
        let function = frame.function;
        let wanted = || {
            let inputs = function.inputs.iter().map(|id| function.value(*id));
            let inputs: Vec<String> = inputs
                .filter(|v| v.ty.as_state().is_none())
                .map(|v| format!("`{}` {}", v.name, v.ty))
                .collect();
            format!("it takes {}", inputs.join(", "))
        };
        let known = |name: &String| function.inputs.iter().any(|id| function.name(*id) == name);
        if let Some(odd) = given.keys().find(|name| !known(name)) {
            bail!("there is no input `{odd}`"; hint: "{}", wanted());
        }
        for id in &function.inputs {
            let input = function.value(*id);
            let value = match (&input.ty, given.get(&input.name)) {
                (Type::State(_), _) => frame.states.reference(&input.name, &input.ty)?,
                (_, None) => bail!("input `{}` is missing", input.name; hint: "{}", wanted()),
                (Type::Tensor(t), Some(Val::Tensor(v))) => {
                    let v = Val::Tensor(v.to_dtype(settle::kind(t.dtype))?);
                    settle::settle(v, &input.ty, self.precision, false)
                        .at(format!("input `{}`", input.name))?
                }
                (ty, Some(_)) => bail!("input `{}` is {ty}, a tensor is expected", input.name),
            };
            frame.set(*id, value)?;
        }
        Ok(())
    }

    /// Runs the ops of a block and gives its outputs.
    fn run_block(&mut self, frame: &mut Frame<'a, '_>, block: &'a Block, plan: &Plan) -> Result<Vec<Val>> {
        for (i, op) in block.ops.iter().enumerate() {
            match plan.reuse.updates.get(&i) {
                _ if plan.reuse.written.contains(&i) => {}
                Some(state) => self.update_state(frame, op, *state)?,
                None => self.run_op(frame, op, plan.blocks(i))?,
            }
            if plan.reuse.copies.contains(&i) {
                frame.detach(op)?;
            }
            for id in plan.frees(i) {
                frame.clear(*id);
            }
        }
        block.outputs.iter().map(|id| frame.get(*id).at(frame.name).cloned()).collect()
    }

    fn run_op(&mut self, frame: &mut Frame<'a, '_>, op: &'a Op, inner: &[Plan]) -> Result<()> {
        let place = |frame: &Frame<'_, '_>| frame.place(op);
        let results = match op.kind.as_str() {
            "const" => return self.constant_op(frame, op).map_err(|e| e.at(place(frame))),
            "cond" => self.cond(frame, op, inner, place)?,
            "while_loop" => self.while_loop(frame, op, inner, place)?,
            _ if self.recall(frame, op)? => return Ok(()),
            _ => self.compute(frame, op).map_err(|e| e.at(place(frame)))?,
        };
        self.accept(frame, op, results).map_err(|e| e.at(place(frame)))
    }

    /// A `slice_update` and the `write_state` after it, in the state's own buffer.
    fn update_state(&mut self, frame: &mut Frame<'a, '_>, op: &'a Op, state: ValueId) -> Result<()> {
        let name = frame.function.name(state);
        let keep = frame.shared.contains(name);
        let call = self.call(frame, op).map_err(|e| e.at(frame.place(op)))?;
        let update = |held: &Tensor| ops::shape::update(&call, held);
        let value = frame.states.update(name, keep, update).map_err(|e| e.at(frame.place(op)))?;
        self.accept(frame, op, vec![value.into()]).map_err(|e| e.at(frame.place(op)))
    }

    fn constant_op(&mut self, frame: &mut Frame<'a, '_>, op: &'a Op) -> Result<()> {
        let (Some(constant), [id]) = (op.constant(), op.outputs.as_slice()) else {
            bail!("attribute `val` and one result are expected");
        };
        if !constant.ty.agrees(frame.function.ty(*id)) {
            bail!("the value is {}, {} is declared", constant.ty, frame.function.ty(*id));
        }
        let value = self.constant(constant, true)?;
        frame.set(*id, value)
    }

    /// Takes results that an earlier run left; only those of constexpr ops are.
    fn recall(&self, frame: &mut Frame<'a, '_>, op: &'a Op) -> Result<bool> {
        let known: Option<Vec<&Val>> =
            op.outputs.iter().map(|id| self.dense.get(&(frame.name, *id))).collect();
        let Some(known) = known.filter(|k| !k.is_empty()) else { return Ok(false) };
        for (id, value) in op.outputs.iter().zip(known) {
            frame.set(*id, value.clone())?;
        }
        Ok(true)
    }

    fn compute(&mut self, frame: &mut Frame<'a, '_>, op: &'a Op) -> Result<Vec<Val>> {
        let Some(spec) = ops::find(&op.kind) else {
            bail!("silane does not know this op");
        };
        let call = self.call(frame, op)?;
        match spec.eval {
            Eval::Unary(f) => ops::one(f(call.tensor("x")?)?),
            Eval::Binary(f) => ops::one(f(call.tensor("x")?, call.tensor("y")?)?),
            Eval::Call(f) => f(&call),
            Eval::Flow => match (op.kind.as_str(), call.get("input")?) {
                ("read_state", Val::State(name)) => {
                    let keep = frame.shared.contains(name.as_str());
                    ops::one(frame.states.read(name, keep)?)
                }
                ("write_state", Val::State(name)) => {
                    let data = call.get("data")?.clone();
                    let fits = settle::fits_state(frame.function, op);
                    let precision = if fits { Precision::Fp32 } else { self.precision };
                    frame.states.write(name, data, precision)?;
                    Ok(Vec::new())
                }
                _ => bail!("`input` is no state"),
            },
            Eval::Unknown => bail!("this op cannot be run"),
        }
    }

    fn cond(
        &mut self,
        frame: &mut Frame<'a, '_>,
        op: &'a Op,
        inner: &[Plan],
        place: impl Fn(&Frame<'_, '_>) -> String,
    ) -> Result<Vec<Val>> {
        let pred = self.call(frame, op).and_then(|c| c.int_or("pred", 0)).map_err(|e| e.at(place(frame)))?;
        let which = usize::from(pred == 0);
        match (op.blocks.get(which), inner.get(which)) {
            (Some(block), Some(plan)) => self.run_block(frame, block, plan),
            _ => Err(Error::new(format!("{} blocks, two are expected", op.blocks.len())).at(place(frame))),
        }
    }

    fn while_loop(
        &mut self,
        frame: &mut Frame<'a, '_>,
        op: &'a Op,
        inner: &[Plan],
        place: impl Fn(&Frame<'_, '_>) -> String,
    ) -> Result<Vec<Val>> {
        let ([test, body], [test_plan, body_plan]) = (op.blocks.as_slice(), inner) else {
            return Err(Error::new(format!("{} blocks, two are expected", op.blocks.len())).at(place(frame)));
        };
        let mut vars = self.call(frame, op).map_err(|e| e.at(place(frame)))?.list("loop_vars").to_vec();
        for _ in 0..ROUNDS {
            frame.enter(test, &vars).map_err(|e| e.at(place(frame)))?;
            let again = self.run_block(frame, test, test_plan)?;
            let again = again.first().map_or(Ok(Vec::new()), Val::to_ints);
            if again.map_err(|e| e.at(place(frame)))?.first().is_none_or(|go| *go == 0) {
                return Ok(vars);
            }
            frame.enter(body, &vars).map_err(|e| e.at(place(frame)))?;
            vars = self.run_block(frame, body, body_plan)?;
        }
        Err(Error::new(format!("no end after {ROUNDS} rounds")).at(place(frame)))
    }

    /// Checks and rounds results, and keeps them.
    fn accept(&mut self, frame: &mut Frame<'a, '_>, op: &'a Op, results: Vec<Val>) -> Result<()> {
        if results.len() != op.outputs.len() {
            bail!("{} results, {} are declared", results.len(), op.outputs.len());
        }
        let precision = if settle::only_moves(frame.function, op) { Precision::Fp32 } else { self.precision };
        let own = reuse::OWN.contains(&op.kind.as_str());
        for (id, value) in op.outputs.iter().zip(results) {
            let value = settle::settle(value, frame.function.ty(*id), precision, own)?;
            if op.kind.starts_with("constexpr_") {
                self.dense.insert((frame.name, *id), value.clone());
            }
            if let Some(tap) = &mut frame.tap {
                tap(op, frame.function.name(*id), &value);
            }
            frame.set(*id, value)?;
        }
        Ok(())
    }

    fn call(&mut self, frame: &Frame<'a, '_>, op: &'a Op) -> Result<Call<'a>> {
        // What only a constexpr op reads is not needed once its result is there.
        let keep = !op.kind.starts_with("constexpr_");
        let mut args = BTreeMap::new();
        for (name, given) in &op.params {
            let value = |arg: &'a Arg| match arg {
                Arg::Value(id) => frame.get(*id).cloned(),
                Arg::Const(c) => self.constant(c, keep),
            };
            args.insert(name.as_str(), given.iter().map(value).collect::<Result<Vec<Val>>>().at(name)?);
        }
        for (name, constant) in op.attrs.iter().filter(|(name, _)| *name != "name") {
            if !keep && !args.contains_key(name.as_str()) {
                args.insert(name.as_str(), vec![self.constant(constant, keep).at(name)?]);
            }
        }
        let outputs = op.outputs.iter().map(|id| frame.function.ty(*id)).collect();
        Ok(Call { op, args, outputs })
    }

    fn constant(&mut self, constant: &Const, keep: bool) -> Result<Val> {
        let Data::Weight(w) = &constant.data else { return Val::constant(constant) };
        let key = (w.key.clone(), w.dtype, w.shape.clone());
        if let Some(value) = self.weights.get(&key) {
            return Ok(value.clone());
        }
        let value = match constant.ty.as_tensor().and_then(TensorType::shape) {
            Some(shape) if w.dtype == DType::F16 => Val::floats(settle::halves(w)?, &shape)?,
            _ => Val::constant(constant)?,
        };
        if keep {
            self.weights.insert(key, value.clone());
        }
        Ok(value)
    }
}

/// One run of a function.
struct Frame<'a, 't> {
    name: &'a str,
    function: &'a Function,
    values: Vec<Option<Val>>,
    states: &'t mut States,
    tap: Option<Tap<'t>>,
    /// Names of states whose buffers something outside the run may hold on to.
    shared: BTreeSet<&'a str>,
}

impl<'a> Frame<'a, '_> {
    /// An op, for messages.
    fn place(&self, op: &Op) -> String {
        let result = op.outputs.first().and_then(|id| self.function.values.get(id.0 as usize));
        let result = result.map_or(op.name(), |v| v.name.as_str());
        format!("{}: {} → {result}", self.name, op.kind)
    }

    fn get(&self, id: ValueId) -> Result<&Val> {
        match self.values.get(id.0 as usize) {
            Some(Some(value)) => Ok(value),
            Some(None) => bail!("`{}` is used before it is defined", self.function.name(id)),
            None => bail!("value {} is outside the function", id.0),
        }
    }

    fn set(&mut self, id: ValueId, value: Val) -> Result<()> {
        match self.values.get_mut(id.0 as usize) {
            Some(slot) => *slot = Some(value),
            None => bail!("value {} is outside the function", id.0),
        }
        Ok(())
    }

    /// Gives the results of an op memory of their own.
    fn detach(&mut self, op: &Op) -> Result<()> {
        for id in &op.outputs {
            if let Val::Tensor(t) = self.get(*id)? {
                let own = t.force_contiguous()?;
                self.set(*id, own.into())?;
            }
        }
        Ok(())
    }

    fn clear(&mut self, id: ValueId) {
        if let Some(slot) = self.values.get_mut(id.0 as usize) {
            *slot = None;
        }
    }

    /// Binds the inputs of the block of a loop.
    fn enter(&mut self, block: &'a Block, vars: &[Val]) -> Result<()> {
        if block.inputs.len() != vars.len() {
            bail!("{} loop variables, a block takes {}", vars.len(), block.inputs.len());
        }
        for (id, value) in block.inputs.iter().zip(vars) {
            self.set(*id, value.clone())?;
        }
        Ok(())
    }
}
