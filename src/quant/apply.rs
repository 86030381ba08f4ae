//! Quantizing a program: every constant is judged, those that are weights get the scheme that the policy
//! has for them, and their const ops become constexpr ops. Nothing is encoded until it is written.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use rayon::prelude::*;
use sha2::{Digest, Sha256};

use super::{
    activations::{Asked, Fits, Pairs},
    calibration::Calibration,
    cell::Cell,
    content,
    dense::decompress,
    forms::{self, Plan},
    guard::Target,
    policy::{Policy, Seen},
    report::{self, Entry, Report, Skipped},
    scheme::Scheme,
    uses::{self, Role, Use},
};
use crate::{
    bail,
    error::{Context, Result},
    graph::build::spell_constants,
    mil::{
        Arg, Block, Const, DType, Data, Function, Literal, Op, Program, TensorType, Type, ValueId, Weight,
    },
    ops::Opset,
};

#[derive(Debug, Clone, Copy, Default)]
pub struct Options {
    pub target: Target,
    /// Takes schemes that are known to run badly on the target.
    pub allow_slow: bool,
    /// Compresses anew what is compressed already.
    pub recompress: bool,
    /// The values are known to be finite, so that weights need not be read before they are encoded.
    pub trusted: bool,
}

/// A weight that is to be compressed.
struct Candidate {
    function: String,
    id: ValueId,
    name: String,
    source: Weight,
    ty: TensorType,
    role: Role,
    scheme: Scheme,
}

/// What becomes of a constant.
enum Verdict {
    Compress(Box<Candidate>),
    Skip(Skipped),
    /// Nothing that anyone would ask about: scalars, strings, what no op reads.
    Ignore,
}

/// Compresses the weights of a program.
pub fn apply(program: &mut Program, policy: &Policy, options: Options) -> Result<Report> {
    apply_calibrated(program, policy, options, None)
}

/// Compresses the weights of a program by what a text taught about their inputs.
pub fn apply_calibrated(
    program: &mut Program,
    policy: &Policy,
    options: Options,
    calibration: Option<&Arc<Calibration>>,
) -> Result<Report> {
    let opset = opset(program)?;
    examine(policy, opset, options)?;
    policy.refuse_untaught(calibration.is_some())?;
    calibration.map_or(Ok(()), |c| c.check()).at("calibration")?;
    for function in program.functions.values_mut() {
        spell_weights(function);
    }
    let (before, elements) = report::weigh(program);
    if options.recompress {
        decompress(program)?;
    }
    let mut report = Report { before, elements, used: vec![false; policy.rules.len()], ..Report::default() };
    let mut candidates = Vec::new();
    for (name, function) in &program.functions {
        let judge = Judge { name, function, policy, options, uses: uses::of(function) };
        function.body.walk(&mut |op| match judge.op(op, &mut report.used) {
            Verdict::Compress(c) => candidates.push(*c),
            Verdict::Skip(s) if !report.skipped.contains(&s) => report.skipped.push(s),
            Verdict::Skip(_) | Verdict::Ignore => {}
        });
    }
    if !options.trusted {
        candidates = finite(candidates, &mut report.skipped)?;
    }
    let looked_up: HashSet<String> =
        candidates.iter().filter(|c| c.role.op == "gather").map(|c| c.source.key.clone()).collect();
    let pairs = pairs(program, &candidates, calibration);
    let mut cells: HashMap<String, Cell> = HashMap::new();
    let mut plans: HashMap<(String, ValueId), Cell> = HashMap::new();
    for c in candidates {
        let shape = &c.source.shape;
        let (weights, note) = forms::fitted(&c.scheme.weights(), shape, c.role.output, c.role.input);
        let activations = pairs.get(&c.function).and_then(|p| p.of(c.id));
        let scheme = if matches!(activations, Some(Ok(_))) { c.scheme } else { weights };
        let plan = Plan::new(weights, &c.role, &c.source, opset).at(&c.name)?;
        let cell = match cells.get(&plan.key(&c.source)) {
            Some(known) => known.shaped(plan),
            None => {
                let width = shape[c.role.input];
                let known = |all: &Arc<Calibration>| {
                    let looked_up = looked_up.contains(&c.source.key);
                    all.guide(&c.source.key, width, looked_up)
                };
                Cell::new(&c.name, &c.source, plan, calibration.map(known))
            }
        };
        cells.insert(cell.key().into(), cell.clone());
        plans.insert((c.function.clone(), c.id), cell.clone());
        let same = |e: &&mut Entry| e.name == c.name && e.cell.same(&cell) && e.activations == activations;
        match report.tensors.iter_mut().find(same) {
            Some(entry) => entry.functions.push(c.function),
            None => report.tensors.push(Entry {
                name: c.name,
                functions: vec![c.function],
                ty: c.ty,
                op: c.role.op,
                scheme,
                activations,
                note,
                bytes: cell.bytes(),
                cell,
            }),
        }
    }
    for (name, function) in &mut program.functions {
        rewrite(name, function, &plans).at(name)?;
        pairs.get(name).map_or(Ok(()), |p| p.insert(function)).at(name)?;
    }
    let mut schemes: Vec<Scheme> = Vec::new();
    for entry in &report.tensors {
        if !schemes.contains(&entry.scheme) {
            schemes.push(entry.scheme);
            report.notes.extend(options.target.note(&entry.scheme).filter(|n| !report.notes.contains(n)));
        }
    }
    report.after = report::weigh(program).0;
    Ok(report)
}

/// Where activations are quantized, by function.
fn pairs(
    program: &Program,
    candidates: &[Candidate],
    calibration: Option<&Arc<Calibration>>,
) -> HashMap<String, Pairs> {
    let mut asked: HashMap<&str, Asked> = HashMap::new();
    for c in candidates.iter().filter(|c| c.scheme == Scheme::W8A8) {
        let known = match calibration {
            Some(all) => all.guide(&c.source.key, c.source.shape[c.role.input], false),
            None => Err("there is no calibration".into()),
        };
        let inputs = known.map(|guide| guide.inputs().clone());
        asked.entry(&c.function).or_default().insert(c.id, inputs);
    }
    let mut fits = Fits::new();
    let plan = |(name, asked): (&str, Asked)| {
        Some((name.to_string(), Pairs::plan(program.functions.get(name)?, &asked, &mut fits)))
    };
    asked.into_iter().filter_map(plan).collect()
}

/// The opset of all functions.
fn opset(program: &Program) -> Result<Opset> {
    let mut found = None;
    for (name, function) in &program.functions {
        if !function.other_bodies.is_empty() {
            bail!("{name}: the function has bodies for several opsets, only one can be compressed");
        }
        match Opset::from_wire(&function.opset) {
            Some(opset) => found = found.max(Some(opset)),
            None => bail!("{name}: the opset `{}` is not known", function.opset),
        }
    }
    match found {
        Some(opset) => Ok(opset),
        None => bail!("the program has no functions"),
    }
}

/// Refuses schemes that the program cannot hold or that the target takes badly, before anything is read.
fn examine(policy: &Policy, opset: Opset, options: Options) -> Result<()> {
    let rules = policy.rules.iter().enumerate().map(|(i, r)| (Some(i), &r.scheme));
    for (rule, scheme) in rules.chain([(None, &policy.default)]) {
        let fits = scheme.check().and_then(|()| forms::possible(scheme, opset));
        let fits =
            fits.and_then(|()| if options.allow_slow { Ok(()) } else { options.target.refuse(scheme) });
        match rule {
            Some(i) => fits.at(format!("rule {} of the recipe", i + 1))?,
            None => fits?,
        }
    }
    Ok(())
}

/// Weights that are bound to ops directly get const ops, as they are saved.
fn spell_weights(function: &mut Function) {
    let mut direct = false;
    function.body.walk(&mut |op| {
        let weight = |a: &Arg| matches!(a, Arg::Const(Const { data: Data::Weight(_), .. }));
        direct |= !op.kind.starts_with("constexpr_") && op.args().any(weight);
    });
    if direct {
        spell_constants(function);
    }
}

/// Judges the constants of one function.
struct Judge<'a> {
    name: &'a str,
    function: &'a Function,
    policy: &'a Policy,
    options: Options,
    uses: HashMap<ValueId, Vec<Use>>,
}

impl Judge<'_> {
    fn op(&self, op: &Op, used: &mut [bool]) -> Verdict {
        let [id] = op.outputs[..] else { return Verdict::Ignore };
        let Type::Tensor(ty) = self.function.ty(id) else { return Verdict::Ignore };
        let uses = self.uses.get(&id).map_or(&[][..], Vec::as_slice);
        if op.kind.starts_with("constexpr_") {
            // One that only another reads is a piece of a weight.
            let piece = |u: &Use| matches!(u, Use::Other { op, .. } if op.starts_with("constexpr_"));
            let whole = ty.dtype.is_float() && !uses.is_empty() && !uses.iter().all(piece);
            let why = format!("compressed already, by {}", op.kind);
            return if whole { self.skip(id, ty, why) } else { Verdict::Ignore };
        }
        let Some(constant) = op.constant() else { return Verdict::Ignore };
        let (Some(shape), Some(count)) = (ty.shape(), ty.count()) else { return Verdict::Ignore };
        if count < 2 || uses.is_empty() || matches!(ty.dtype, DType::Bool | DType::String) {
            return Verdict::Ignore;
        }
        let in_file = matches!(constant.data, Data::Weight(_));
        if !ty.dtype.is_float() {
            // Axes, shapes and the like are no tables.
            return if in_file { self.skip(id, ty, "integers") } else { Verdict::Ignore };
        }
        let role = match role(uses) {
            Ok(role) => role,
            Err(why) => return self.skip(id, ty, why),
        };
        let ops: Vec<&str> = uses
            .iter()
            .filter_map(|u| match u {
                Use::Weight(role) => Some(role.op.as_str()),
                _ => None,
            })
            .collect();
        let key = match &constant.data {
            Data::Weight(w) => w.key.as_str(),
            Data::Literal(_) => "",
        };
        let names = [self.function.name(id), op.name(), tensor_of(key)];
        let (rule, scheme) = self.policy.choose(Seen { names: &names, ops: &ops });
        if let Some(used) = rule.and_then(|i| used.get_mut(i)) {
            *used = true;
        }
        if *scheme == Scheme::Dense {
            let by = rule.map_or("the default scheme".into(), |i| format!("rule {}", i + 1));
            return self.skip(id, ty, format!("left as it is, by {by}"));
        }
        if count < self.policy.smallest {
            return self.skip(id, ty, format!("fewer than {} elements", self.policy.smallest));
        }
        if !matches!(ty.dtype, DType::F16 | DType::F32) {
            return self.skip(id, ty, format!("{} has no compressed form", ty.dtype));
        }
        if role.op == "gather" && names.iter().any(|n| content::named_rotary(n)) {
            return self.skip(id, ty, "a table of rotary factors");
        }
        let spared = if self.options.allow_slow { None } else { self.options.target.spares(scheme, role) };
        if let Some(why) = spared {
            return self.skip(id, ty, why);
        }
        let source = match &constant.data {
            Data::Weight(w) => w.clone(),
            Data::Literal(l) => match literal(l, ty.dtype, shape) {
                Some(weight) => weight,
                None => return Verdict::Ignore,
            },
        };
        Verdict::Compress(Box::new(Candidate {
            function: self.name.into(),
            id,
            name: self.function.name(id).into(),
            source,
            ty: ty.clone(),
            role: role.clone(),
            scheme: *scheme,
        }))
    }

    fn skip(&self, id: ValueId, ty: &TensorType, why: impl Into<String>) -> Verdict {
        Verdict::Skip(report::skipped(self.function.name(id), ty, why))
    }
}

/// The role that all readers agree to see a weight in, or why it is none.
fn role(uses: &[Use]) -> Result<&Role, String> {
    let mut found: Option<&Role> = None;
    for one in uses {
        match one {
            Use::Weight(role) => found = Some(found.filter(|f| f.stride >= role.stride).unwrap_or(role)),
            Use::Other { op, param } => return Err(format!("`{param}` of {op}, which is no weight")),
            Use::Output => return Err("it is a result of the function".into()),
        }
    }
    found.ok_or_else(|| "nothing reads it".into())
}

/// The checkpoint's name in a weight's key, as far as it has one.
fn tensor_of(key: &str) -> &str {
    match key.strip_prefix("ckpt:") {
        Some(tensor) => tensor.split(" | ").next().unwrap_or(tensor),
        None => "",
    }
}

/// A weight that is written out in the program.
fn literal(literal: &Literal, dtype: DType, shape: Vec<usize>) -> Option<Weight> {
    let bytes: Vec<u8> = match (literal, dtype) {
        (Literal::Bytes(b), DType::F16) => b.clone(),
        (Literal::Floats(v), DType::F32) => v.iter().flat_map(|f| f.to_le_bytes()).collect(),
        _ => return None,
    };
    // One element may stand for all, which is no weight.
    (bytes.len() == dtype.packed_len(shape.iter().product())?).then(|| {
        let digest: String = Sha256::digest(&bytes).iter().map(|b| format!("{b:02x}")).collect();
        Weight::new(format!("literal {digest}"), dtype, shape, move || Ok(bytes.clone().into()))
    })
}

/// Reads the candidates: what is no number is refused, tables that only look like weights are left alone.
fn finite(candidates: Vec<Candidate>, skipped: &mut Vec<Skipped>) -> Result<Vec<Candidate>> {
    let findings: Vec<Result<Option<String>>> = candidates
        .par_iter()
        .map(|c| {
            content::examine(&c.source, c.role.op == "gather")
                .at(format!("{}: weight `{}`", c.function, c.name))
        })
        .collect();
    let mut kept = Vec::new();
    for (c, finding) in candidates.into_iter().zip(findings) {
        match finding? {
            None => kept.push(c),
            Some(why) => {
                let skip = report::skipped(&c.name, &c.ty, why);
                if !skipped.contains(&skip) {
                    skipped.push(skip);
                }
            }
        }
    }
    Ok(kept)
}

/// Puts constexpr ops in the places of const ops.
fn rewrite(name: &str, function: &mut Function, plans: &HashMap<(String, ValueId), Cell>) -> Result<()> {
    let mut names: HashSet<String> = function.values.iter().map(|v| v.name.clone()).collect();
    let mut body = std::mem::take(&mut function.body);
    let done = rewrite_block(&mut body, &mut |op: Op| {
        let cell = match op.outputs.first() {
            Some(id) if op.kind == "const" => plans.get(&(name.to_string(), *id)),
            _ => None,
        };
        match cell {
            Some(cell) => forms::ops(cell, &op, function, &mut names),
            None => Ok(vec![op]),
        }
    });
    function.body = body;
    done
}

fn rewrite_block(block: &mut Block, f: &mut impl FnMut(Op) -> Result<Vec<Op>>) -> Result<()> {
    let mut ops = Vec::with_capacity(block.ops.len());
    for mut op in std::mem::take(&mut block.ops) {
        for inner in &mut op.blocks {
            rewrite_block(inner, f)?;
        }
        ops.extend(f(op)?);
    }
    block.ops = ops;
    Ok(())
}
