//! From the wire to a `mil::Program`, one to one: names become values of the function's arena.

use std::collections::{BTreeMap, HashMap};

use super::{blob::WeightFiles, proto::coreml::mil as pb};
use crate::{
    bail,
    error::{Context, Result},
    mil::{Arg, Block, Const, DType, Data, Dim, Function, Literal, Op, Program, TensorType, Type, ValueId},
};

pub(super) fn program(p: pb::Program, weights: &mut WeightFiles) -> Result<Program> {
    let attrs = attributes(p.attributes, weights)?;
    let mut functions = BTreeMap::new();
    for (name, f) in p.functions {
        let function = function(f, weights).at(&name)?;
        functions.insert(name, function);
    }
    Ok(Program { functions, default_function: String::new(), attrs, doc: p.doc_string })
}

fn function(f: pb::Function, weights: &mut WeightFiles) -> Result<Function> {
    let attrs = attributes(f.attributes, weights)?;
    let mut scope = Scope { function: Function::default(), names: vec![HashMap::new()], weights };
    let inputs = scope.define_all(f.inputs)?;
    let mut blocks = BTreeMap::new();
    for (opset, b) in f.block_specializations {
        let block = scope.block(b)?;
        blocks.insert(opset, block);
    }
    let Some(body) = blocks.remove(&f.opset) else {
        bail!("no block for its opset `{}`, there is {:?}", f.opset, blocks.keys().collect::<Vec<_>>());
    };
    Ok(Function { opset: f.opset, inputs, body, other_bodies: blocks, attrs, ..scope.function })
}

/// A function being read, with the names that each open block has defined so far.
struct Scope<'a> {
    function: Function,
    names: Vec<HashMap<String, ValueId>>,
    weights: &'a mut WeightFiles,
}

impl Scope<'_> {
    fn block(&mut self, b: pb::Block) -> Result<Block> {
        self.names.push(HashMap::new());
        let inputs = self.define_all(b.inputs)?;
        let attrs = attributes(b.attributes, self.weights)?;
        let mut ops = Vec::with_capacity(b.operations.len());
        for op in b.operations {
            ops.push(self.op(op)?);
        }
        let outputs = b.outputs.iter().map(|n| self.find(n).at("block outputs")).collect::<Result<_>>()?;
        self.names.pop();
        Ok(Block { inputs, ops, outputs, attrs })
    }

    fn op(&mut self, op: pb::Operation) -> Result<Op> {
        let place = op.outputs.first().map_or(op.r#type.clone(), |o| o.name.clone());
        self.op_inner(op).at(place)
    }

    fn op_inner(&mut self, op: pb::Operation) -> Result<Op> {
        let attrs = attributes(op.attributes, self.weights)?;
        let mut params = BTreeMap::new();
        for (name, argument) in op.inputs {
            let args =
                argument.arguments.into_iter().map(|b| self.arg(b)).collect::<Result<_>>().at(&name)?;
            params.insert(name, args);
        }
        let blocks = op.blocks.into_iter().map(|b| self.block(b)).collect::<Result<_>>()?;
        let outputs = self.define_all(op.outputs)?;
        Ok(Op { kind: op.r#type, params, outputs, blocks, attrs })
    }

    fn arg(&mut self, b: pb::argument::Binding) -> Result<Arg> {
        match b.binding {
            Some(pb::argument::binding::Binding::Name(name)) => Ok(Arg::Value(self.find(&name)?)),
            Some(pb::argument::binding::Binding::Value(v)) => Ok(Arg::Const(constant(v, self.weights)?)),
            None => bail!("an argument that is neither a name nor a value"),
        }
    }

    fn find(&self, name: &str) -> Result<ValueId> {
        match self.names.iter().rev().find_map(|names| names.get(name)) {
            Some(id) => Ok(*id),
            None => bail!("`{name}` is used before anything defines it"),
        }
    }

    fn define_all(&mut self, values: Vec<pb::NamedValueType>) -> Result<Vec<ValueId>> {
        values
            .into_iter()
            .map(|v| {
                let ty = ty(v.r#type, self.weights).at(&v.name)?;
                let id = self.function.add(v.name.clone(), ty);
                if let Some(names) = self.names.last_mut() {
                    names.insert(v.name, id);
                }
                Ok(id)
            })
            .collect()
    }
}

fn attributes(
    attrs: BTreeMap<String, pb::Value>,
    weights: &mut WeightFiles,
) -> Result<BTreeMap<String, Const>> {
    attrs
        .into_iter()
        .map(|(name, v)| {
            let c = constant(v, weights).at(&name)?;
            Ok((name, c))
        })
        .collect()
}

fn constant(v: pb::Value, weights: &mut WeightFiles) -> Result<Const> {
    let ty = ty(v.r#type, weights)?;
    let data = match v.value {
        None => Data::Literal(Literal::Missing),
        Some(pb::value::Value::ImmediateValue(i)) => Data::Literal(literal(i, weights)?),
        Some(pb::value::Value::BlobFileValue(b)) => {
            match ty.as_tensor().and_then(|t| Some((t.dtype, t.shape()?))) {
                Some((dtype, shape)) => Data::Weight(weights.weight(&b.file_name, b.offset, dtype, shape)),
                None => bail!("a weight of type {ty}, a tensor of fixed size is expected"),
            }
        }
    };
    Ok(Const { ty, data, doc: v.doc_string })
}

fn literal(i: pb::value::Immediate, weights: &mut WeightFiles) -> Result<Literal> {
    use pb::{tensor_value::Value as T, value::immediate::Value as V};
    let mut constants =
        |values: Vec<pb::Value>| values.into_iter().map(|v| constant(v, weights)).collect::<Result<_>>();
    Ok(match i.value {
        None => Literal::Missing,
        Some(V::Tensor(t)) => match t.value {
            None => Literal::Empty,
            Some(T::Floats(v)) => Literal::Floats(v.values),
            Some(T::Ints(v)) => Literal::Ints(v.values),
            Some(T::Bools(v)) => Literal::Bools(v.values),
            Some(T::Strings(v)) => Literal::Strings(v.values),
            Some(T::LongInts(v)) => Literal::Longs(v.values),
            Some(T::Doubles(v)) => Literal::Doubles(v.values),
            Some(T::Bytes(v)) => Literal::Bytes(v.values),
        },
        Some(V::Tuple(t)) => Literal::Tuple(constants(t.values)?),
        Some(V::List(l)) => Literal::List(constants(l.values)?),
        Some(V::Dictionary(d)) => Literal::Dict(
            d.values
                .into_iter()
                .map(|pair| {
                    let (Some(key), Some(value)) = (pair.key, pair.value) else {
                        bail!("a dictionary entry without key or value");
                    };
                    Ok((constant(key, weights)?, constant(value, weights)?))
                })
                .collect::<Result<_>>()?,
        ),
    })
}

fn ty(t: Option<pb::ValueType>, weights: &mut WeightFiles) -> Result<Type> {
    use pb::value_type::Type as T;
    Ok(match t.and_then(|t| t.r#type) {
        None => Type::Unset,
        Some(T::TensorType(t)) => Type::Tensor(tensor(t, weights)?),
        Some(T::ListType(l)) => Type::List {
            element: Box::new(boxed(l.r#type, weights)?),
            length: l.length.map(dim).transpose()?,
        },
        Some(T::TupleType(t)) => {
            Type::Tuple(t.types.into_iter().map(|t| ty(Some(t), weights)).collect::<Result<_>>()?)
        }
        Some(T::DictionaryType(d)) => {
            Type::Dict(Box::new(boxed(d.key_type, weights)?), Box::new(boxed(d.value_type, weights)?))
        }
        Some(T::StateType(s)) => Type::State(Box::new(boxed(s.wrapped_type, weights)?)),
    })
}

fn boxed(t: Option<Box<pb::ValueType>>, weights: &mut WeightFiles) -> Result<Type> {
    ty(t.map(|t| *t), weights)
}

fn tensor(t: pb::TensorType, weights: &mut WeightFiles) -> Result<TensorType> {
    let Some((dtype, _)) = DTYPES.iter().find(|(_, code)| *code == t.data_type) else {
        bail!("element type {} is not known", t.data_type);
    };
    if usize::try_from(t.rank).ok() != Some(t.dimensions.len()) {
        bail!("a tensor of rank {} with {} sizes", t.rank, t.dimensions.len());
    }
    let dims = t.dimensions.into_iter().map(dim).collect::<Result<_>>()?;
    Ok(TensorType { dtype: *dtype, dims, attrs: attributes(t.attributes, weights)? })
}

fn dim(d: pb::Dimension) -> Result<Dim> {
    match d.dimension {
        Some(pb::dimension::Dimension::Constant(c)) => match usize::try_from(c.size) {
            Ok(n) => Ok(Dim::Fixed(n)),
            Err(_) => bail!("a dimension of {} is too large", c.size),
        },
        Some(pb::dimension::Dimension::Unknown(u)) => Ok(Dim::Unknown { variadic: u.variadic }),
        None => bail!("a dimension that is neither fixed nor unknown"),
    }
}

/// Element types and their numbers on the wire.
pub(super) const DTYPES: [(DType, i32); 22] = [
    (DType::Bool, 1),
    (DType::String, 2),
    (DType::F16, 10),
    (DType::F32, 11),
    (DType::F64, 12),
    (DType::BF16, 13),
    (DType::I8, 21),
    (DType::I16, 22),
    (DType::I32, 23),
    (DType::I64, 24),
    (DType::I4, 25),
    (DType::U8, 31),
    (DType::U16, 32),
    (DType::U32, 33),
    (DType::U64, 34),
    (DType::U4, 35),
    (DType::U2, 36),
    (DType::U1, 37),
    (DType::U6, 38),
    (DType::U3, 39),
    (DType::F8E4M3, 40),
    (DType::F8E5M2, 41),
];
