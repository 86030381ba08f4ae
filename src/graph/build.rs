//! The one way to add an op: its type is inferred at once, so a wrong graph fails at the author's line.

use std::collections::{BTreeMap, HashSet};

use crate::{
    bail,
    error::{Context, Result},
    mil::{Arg, Block, Const, DType, Data, Function, Op, TensorType, Type, ValueId, Weight},
    ops::{self, Args, Need, Opset},
};

/// A function under construction.
pub struct Builder {
    function: Function,
    opset: Opset,
    names: HashSet<String>,
}

/// What a parameter can be given.
#[derive(Debug, Clone)]
pub struct In(Vec<Arg>);

impl Builder {
    pub fn new(opset: Opset) -> Self {
        let function = Function { opset: opset.wire().into(), ..Function::default() };
        Self { function, opset, names: HashSet::new() }
    }

    /// Adds an input, or a state when `ty` is one. The name is the contract's own and is kept exactly.
    pub fn input(&mut self, name: &str, ty: impl Into<Type>) -> Result<ValueId> {
        self.claim(name)?;
        let id = self.function.add(name, ty.into());
        self.function.inputs.push(id);
        Ok(id)
    }

    /// Adds an op with one result, named after `place`.
    pub fn op<const N: usize>(
        &mut self,
        kind: &str,
        place: &str,
        params: [(&str, In); N],
    ) -> Result<ValueId> {
        let outputs = self.ops(kind, place, params)?;
        match outputs.as_slice() {
            [one] => Ok(*one),
            _ => bail!("{place}: {kind} has {} results, one is expected", outputs.len()),
        }
    }

    /// Adds an op with any number of results.
    pub fn ops<const N: usize>(
        &mut self,
        kind: &str,
        place: &str,
        params: [(&str, In); N],
    ) -> Result<Vec<ValueId>> {
        let Some(spec) = ops::find(kind) else { bail!("{place}: op `{kind}` is not in the table") };
        let mut given: BTreeMap<String, Vec<Arg>> =
            params.into_iter().filter(|(_, v)| !v.0.is_empty()).map(|(n, v)| (n.to_string(), v.0)).collect();
        if let Some(odd) = given.keys().find(|n| spec.param(n).is_none()) {
            bail!("{place}: {kind} has no parameter `{odd}`");
        }
        let x = self.operand_dtype(spec, &given);
        for p in spec.params.iter().filter(|p| p.since <= self.opset) {
            match p.need {
                _ if given.contains_key(p.name) => {}
                Need::Written(preset) => match preset.constant(x) {
                    Some(c) => drop(given.insert(p.name.into(), vec![Arg::Const(c)])),
                    None => bail!("{place}: {kind} wants `{}` written out", p.name),
                },
                Need::Required => bail!("{place}: {kind} wants `{}`", p.name),
                Need::Optional => {}
            }
        }
        let mut op = Op { kind: kind.into(), params: given, ..Op::default() };
        let args = Args { function: &self.function, scope: None, op: &op };
        let types = (spec.infer)(&args).at(kind).at(place)?;
        let base = self.fresh(place);
        op.attrs.insert("name".into(), Const::string(base.clone()));
        op.outputs = match types.len() {
            1 => vec![self.function.add(base, types.into_iter().next().unwrap_or(Type::Unset))],
            _ => {
                let add = |(i, ty)| {
                    let name = self.fresh(&format!("{base}_{i}"));
                    self.function.add(name, ty)
                };
                types.into_iter().enumerate().map(add).collect()
            }
        };
        let outputs = op.outputs.clone();
        self.function.body.ops.push(op);
        Ok(outputs)
    }

    /// Gives a result the name that the contract wants; the op that made it is named the same.
    pub fn rename(&mut self, id: ValueId, name: &str) -> Result<()> {
        self.claim(name)?;
        let old = std::mem::replace(&mut self.function.value_mut(id).name, name.into());
        self.names.remove(&old);
        if let Some(op) = self.function.body.ops.iter_mut().rev().find(|op| op.outputs == [id]) {
            op.attrs.insert("name".into(), Const::string(name));
        }
        Ok(())
    }

    pub fn finish(mut self, outputs: Vec<ValueId>) -> Function {
        self.function.body.outputs = outputs;
        self.function
    }

    pub fn opset(&self) -> Opset {
        self.opset
    }

    pub fn ty(&self, id: ValueId) -> &Type {
        self.function.ty(id)
    }

    pub fn tensor(&self, id: ValueId) -> Result<&TensorType> {
        match self.function.ty(id) {
            Type::Tensor(t) => Ok(t),
            other => bail!("{}: {other} is no tensor", self.function.name(id)),
        }
    }

    /// The sizes of a value; every activation that silane builds has fixed ones.
    pub fn shape(&self, id: ValueId) -> Result<Vec<usize>> {
        match self.tensor(id)?.shape() {
            Some(shape) => Ok(shape),
            None => bail!("{}: {} has a size that is not fixed", self.function.name(id), self.ty(id)),
        }
    }

    fn operand_dtype(&self, spec: &ops::Spec, given: &BTreeMap<String, Vec<Arg>>) -> DType {
        let dtype = |arg: &Arg| match arg {
            Arg::Value(id) => self.function.ty(*id).as_tensor().map(|t| t.dtype),
            Arg::Const(c) => c.ty.as_tensor().map(|t| t.dtype),
        };
        let first = spec.params.first().and_then(|p| given.get(p.name)).and_then(|a| a.first());
        first.and_then(dtype).unwrap_or(DType::F16)
    }

    fn claim(&mut self, name: &str) -> Result<()> {
        if !is_identifier(name) {
            bail!("`{name}` cannot be a name in Core ML"; hint: "letters, digits and `_`, not starting with a digit, and no reserved word");
        }
        if !self.names.insert(name.into()) {
            bail!("the name `{name}` is used twice");
        }
        Ok(())
    }

    fn fresh(&mut self, place: &str) -> String {
        let base = identifier(place);
        let mut name = base.clone();
        let mut n = 0;
        while !self.names.insert(name.clone()) {
            n += 1;
            name = format!("{base}_{n}");
        }
        name
    }
}

/// Words of MIL text, which the compiler prints a program as.
pub const RESERVED: [&str; 24] = [
    "any", "bool", "program", "func", "tensor", "list", "dict", "tuple", "true", "false", "string", "bf16",
    "fp16", "fp32", "fp64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "state",
];

/// Whether Core ML takes `name` for a function, value, input or output.
pub fn is_identifier(name: &str) -> bool {
    let mut chars = name.chars();
    chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
        && !RESERVED.contains(&name)
}

/// The nearest identifier to a place in the checkpoint: `layers.0.attn` → `layers_0_attn`.
pub fn identifier(place: &str) -> String {
    let mut name: String =
        place.chars().map(|c| if c.is_ascii_alphanumeric() || c == '_' { c } else { '_' }).collect();
    if !name.chars().next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_') {
        name.insert(0, '_');
    }
    if RESERVED.contains(&name.as_str()) {
        name.push('_');
    }
    name
}

impl In {
    /// A float scalar of the given type.
    pub fn float(dtype: DType, v: f32) -> In {
        Const::float(dtype, v).into()
    }

    pub fn into_args(self) -> Vec<Arg> {
        self.0
    }

    /// Nothing: the parameter is left out.
    pub fn none() -> In {
        In(Vec::new())
    }
}

impl From<ValueId> for In {
    fn from(id: ValueId) -> In {
        In(vec![Arg::Value(id)])
    }
}

impl From<&[ValueId]> for In {
    fn from(ids: &[ValueId]) -> In {
        In(ids.iter().map(|id| Arg::Value(*id)).collect())
    }
}

impl From<Vec<Arg>> for In {
    fn from(args: Vec<Arg>) -> In {
        In(args)
    }
}

impl From<Arg> for In {
    fn from(arg: Arg) -> In {
        In(vec![arg])
    }
}

impl From<Const> for In {
    fn from(c: Const) -> In {
        In(vec![Arg::Const(c)])
    }
}

impl From<Weight> for In {
    fn from(w: Weight) -> In {
        Const::weight(w).into()
    }
}

impl From<Option<Weight>> for In {
    fn from(w: Option<Weight>) -> In {
        w.map_or(In::none(), In::from)
    }
}

impl From<bool> for In {
    fn from(b: bool) -> In {
        Const::bool(b).into()
    }
}

impl From<&[bool]> for In {
    fn from(b: &[bool]) -> In {
        Const::bools(b).into()
    }
}

impl From<i32> for In {
    fn from(i: i32) -> In {
        Const::int(i).into()
    }
}

impl From<&[i32]> for In {
    fn from(v: &[i32]) -> In {
        Const::ints(v).into()
    }
}

impl<const N: usize> From<[i32; N]> for In {
    fn from(v: [i32; N]) -> In {
        Const::ints(&v).into()
    }
}

impl From<&str> for In {
    fn from(s: &str) -> In {
        Const::string(s).into()
    }
}

/// A constant of this function's ops, spelt as `const` ops at the head of the block, each value once.
///
/// The builder binds constants to parameters directly; Core ML programs as coremltools writes them have
/// an op for each, and weights must.
pub fn spell_constants(function: &mut Function) {
    let mut names: HashSet<String> = function.values.iter().map(|v| v.name.clone()).collect();
    let mut spelt: Vec<(Const, ValueId)> = Vec::new();
    let mut index: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let mut body = std::mem::take(&mut function.body);
    let mut head = Vec::new();
    body.walk_mut(&mut |op| {
        // A constexpr from iOS 18 on takes literals, and an older one has its parameters in attributes.
        if op.kind.starts_with("constexpr_") {
            return;
        }
        let place = op.name().to_string();
        for (param, args) in &mut op.params {
            for arg in args {
                let Arg::Const(c) = arg else { continue };
                let key = format!("{:?}", (&c.ty, &c.data));
                let known = index.entry(key).or_default();
                let id = match known.iter().find(|i| spelt[**i].0 == *c) {
                    Some(i) => spelt[*i].1,
                    None => {
                        let base = match c.data {
                            Data::Weight(_) => identifier(&format!("{place}_{param}")),
                            Data::Literal(_) => identifier(param),
                        };
                        let mut name = base.clone();
                        let mut n = 0;
                        while !names.insert(name.clone()) {
                            n += 1;
                            name = format!("{base}_{n}");
                        }
                        let id = function.add(name.clone(), c.ty.clone());
                        let attrs = BTreeMap::from([
                            ("name".to_string(), Const::string(name)),
                            ("val".to_string(), c.clone()),
                        ]);
                        head.push(Op { kind: "const".into(), outputs: vec![id], attrs, ..Op::default() });
                        known.push(spelt.len());
                        spelt.push((c.clone(), id));
                        id
                    }
                };
                *arg = Arg::Value(id);
            }
        }
    });
    head.append(&mut body.ops);
    body.ops = head;
    function.body = Block { ..body };
}
