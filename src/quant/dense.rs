//! Compressed weights made dense again: a promise that runs the constexpr ops which make the value, slab by slab
//! where that is possible.

use std::{
    collections::{BTreeMap, HashMap, HashSet, hash_map::Entry},
    sync::Arc,
};

use half::{f16, slice::HalfFloatSliceExt};

use super::slabs;
use crate::{
    bail,
    error::{Context, Result},
    mil::{
        Arg, Bytes, Const, DType, Data, Function, Op, Program, Type, ValueId, Weight, constant::encode_floats,
    },
    ops::{self, Call, Eval, Val},
};

/// An op that makes a weight, with what it is made from.
#[derive(Debug)]
pub(super) struct Maker {
    pub(super) op: Op,
    /// Declared types of the results.
    pub(super) types: Vec<Type>,
    /// Where arguments come from that are results themselves.
    pub(super) sources: BTreeMap<ValueId, Made>,
}

/// An op and which of its results.
type Made = (Arc<Maker>, usize);

/// Turns every compressed weight of floats into a dense one, and says how many there were.
pub fn decompress(program: &mut Program) -> Result<usize> {
    let mut count = 0;
    for (name, function) in &mut program.functions {
        count += restore(function).at(name)?;
    }
    Ok(count)
}

fn restore(function: &mut Function) -> Result<usize> {
    let (made, read_outside) = makers(function);
    let mut dense: HashMap<ValueId, Weight> = HashMap::new();
    for id in read_outside {
        let Some((maker, at)) = made.get(&id).filter(|(m, _)| m.op.kind != "const") else { continue };
        if let Entry::Vacant(place) = dense.entry(id) {
            place.insert(promise(maker, *at).at(function.name(id))?);
        }
    }
    let mut body = std::mem::take(&mut function.body);
    body.walk_blocks(&mut |block| {
        let ops = std::mem::take(&mut block.ops);
        block.ops = ops.into_iter().flat_map(|op| replaced(op, &dense)).collect();
    });
    function.body = body;
    drop_unread(function);
    Ok(dense.len())
}

/// What makes each value that is constant, and the values that other ops or the caller read.
pub(super) fn makers(function: &Function) -> (HashMap<ValueId, Made>, Vec<ValueId>) {
    let mut made: HashMap<ValueId, Made> = HashMap::new();
    let mut read_outside: Vec<ValueId> = function.body.outputs.clone();
    function.body.walk(&mut |op| {
        if op.kind.starts_with("constexpr_") || op.kind == "const" {
            let types = op.outputs.iter().map(|id| function.ty(*id).clone()).collect();
            let values = op.args().filter_map(|a| match a {
                Arg::Value(id) => Some((*id, made.get(id)?.clone())),
                Arg::Const(_) => None,
            });
            let maker = Arc::new(Maker { op: op.clone(), types, sources: values.collect() });
            made.extend(op.outputs.iter().enumerate().map(|(i, id)| (*id, (maker.clone(), i))));
        } else {
            read_outside.extend(op.args().filter_map(|a| match a {
                Arg::Value(id) => Some(*id),
                Arg::Const(_) => None,
            }));
            read_outside.extend(op.blocks.iter().flat_map(|b| &b.outputs));
        }
    });
    (made, read_outside)
}

/// The op, or for a constexpr one a const for each of its results that is read.
fn replaced(op: Op, dense: &HashMap<ValueId, Weight>) -> Vec<Op> {
    if !op.outputs.iter().any(|id| dense.contains_key(id)) {
        return vec![op];
    }
    let read = op.outputs.iter().filter_map(|id| Some((*id, dense.get(id)?.clone())));
    read.map(|(id, weight)| {
        let attrs = BTreeMap::from([
            ("name".to_string(), Const::string(op.name())),
            ("val".to_string(), Const::weight(weight)),
        ]);
        Op { kind: "const".into(), outputs: vec![id], attrs, ..Op::default() }
    })
    .collect()
}

/// Removes constexpr ops that only fed others which are gone.
fn drop_unread(function: &mut Function) {
    loop {
        let mut read: HashSet<ValueId> = function.body.outputs.iter().copied().collect();
        function.body.walk(&mut |op| {
            read.extend(op.args().filter_map(|a| match a {
                Arg::Value(id) => Some(*id),
                Arg::Const(_) => None,
            }));
            read.extend(op.blocks.iter().flat_map(|b| &b.outputs));
        });
        let mut dropped = false;
        function.body.walk_blocks(&mut |block| {
            block.ops.retain(|op| {
                let kept =
                    !op.kind.starts_with("constexpr_") || op.outputs.iter().any(|id| read.contains(id));
                dropped |= !kept;
                kept
            });
        });
        if !dropped {
            return;
        }
    }
}

fn promise(maker: &Arc<Maker>, at: usize) -> Result<Weight> {
    let Some(Type::Tensor(t)) = maker.types.get(at) else { bail!("a compressed weight is no tensor") };
    let (Some(shape), true) = (t.shape(), matches!(t.dtype, DType::F16 | DType::F32)) else {
        bail!("{t} cannot be made dense");
    };
    let (key, dtype, source) = (format!("dense {} {at}", maker.key()), t.dtype, maker.clone());
    Ok(Weight::new(key, dtype, shape, move || {
        // What is wrong with a weight is said of it as a whole.
        if let Ok(Some(bytes)) = slabs::bytes(&source, at, slabs::ELEMENTS) {
            return Ok(Bytes::Owned(bytes));
        }
        let values = source.run()?;
        let Some(value) = values.get(at) else { bail!("there is no result {at}") };
        Ok(Bytes::Owned(encode_floats(dtype, &value.to_floats()?)?))
    }))
}

impl Maker {
    /// Equal for equal values: the op, and the keys of everything that it is made from.
    fn key(&self) -> String {
        let constant = |c: &Const| match &c.data {
            Data::Weight(w) => format!("{} {}", w.key, c.ty),
            Data::Literal(l) => format!("{} {l:?}", c.ty),
        };
        let mut text = self.op.kind.clone();
        for (name, c) in self.op.attrs.iter().filter(|(n, _)| *n != "name") {
            text.push_str(&format!(" {name}={}", constant(c)));
        }
        for (name, args) in &self.op.params {
            for arg in args {
                let value = match arg {
                    Arg::Const(c) => constant(c),
                    Arg::Value(id) => match self.sources.get(id) {
                        Some((maker, at)) => format!("({} {at})", maker.key()),
                        None => format!("{id:?}"),
                    },
                };
                text.push_str(&format!(" {name}={value}"));
            }
        }
        text
    }

    pub(super) fn run(&self) -> Result<Vec<Val>> {
        if let Some(c) = self.op.constant() {
            return Ok(vec![Val::constant(c)?]);
        }
        let mut args: BTreeMap<&str, Vec<Val>> = BTreeMap::new();
        for (name, c) in self.op.attrs.iter().filter(|(n, _)| *n != "name") {
            args.insert(name, vec![Val::constant(c).at(name)?]);
        }
        for (name, given) in &self.op.params {
            let value = |arg: &Arg| match arg {
                Arg::Const(c) => Val::constant(c),
                Arg::Value(id) => match self.sources.get(id) {
                    Some((maker, at)) => match maker.run()?.into_iter().nth(*at) {
                        Some(value) => Ok(value),
                        None => bail!("there is no result {at}"),
                    },
                    None => bail!("it is computed, a constant is expected"),
                },
            };
            args.insert(name, given.iter().map(value).collect::<Result<_>>().at(name)?);
        }
        self.call(args)
    }

    /// The results for some arguments, rounded to their types.
    pub(super) fn call(&self, args: BTreeMap<&str, Vec<Val>>) -> Result<Vec<Val>> {
        let Some(ops::Spec { eval: Eval::Call(eval), .. }) = ops::find(&self.op.kind) else {
            bail!("silane does not know how to expand `{}`", self.op.kind);
        };
        let results = eval(&Call { op: &self.op, args, outputs: self.types.iter().collect() })?;
        results.into_iter().zip(&self.types).map(|(value, ty)| settled(value, ty)).collect()
    }
}

/// Rounded to the declared type, as the op's result is.
fn settled(value: Val, ty: &Type) -> Result<Val> {
    match (ty, &value) {
        (Type::Tensor(t), Val::Tensor(tensor)) if t.dtype == DType::F16 => {
            let mut floats = value.to_floats()?;
            let mut halves = vec![f16::ZERO; floats.len()];
            halves.convert_from_f32_slice(&floats);
            halves.convert_to_f32_slice(&mut floats);
            Val::floats(floats, tensor.dims())
        }
        _ => Ok(value),
    }
}
