//! From a `mil::Program` to the wire, one to one.

use std::collections::BTreeMap;

use super::{decode::DTYPES, proto::coreml::mil as pb};
use crate::{
    error::Result,
    mil::{Arg, Block, Const, Data, Dim, Function, Literal, Op, Program, TensorType, Type, ValueId, Weight},
};

/// Decides where a weight is: file name and offset.
pub(super) type Place<'a> = &'a mut dyn FnMut(&Weight) -> Result<(String, u64)>;

pub(super) fn program(p: &Program, place: Place<'_>) -> Result<pb::Program> {
    let attributes = attributes(&p.attrs, place)?;
    let functions =
        p.functions.iter().map(|(n, f)| Ok((n.clone(), function(f, place)?))).collect::<Result<_>>()?;
    Ok(pb::Program { version: 1, functions, doc_string: p.doc.clone(), attributes })
}

fn function(f: &Function, place: Place<'_>) -> Result<pb::Function> {
    let mut block_specializations = BTreeMap::from([(f.opset.clone(), block(f, &f.body, place)?)]);
    for (opset, b) in &f.other_bodies {
        block_specializations.insert(opset.clone(), block(f, b, place)?);
    }
    Ok(pb::Function {
        inputs: values(f, &f.inputs, place)?,
        opset: f.opset.clone(),
        block_specializations,
        attributes: attributes(&f.attrs, place)?,
    })
}

fn block(f: &Function, b: &Block, place: Place<'_>) -> Result<pb::Block> {
    Ok(pb::Block {
        inputs: values(f, &b.inputs, place)?,
        outputs: b.outputs.iter().map(|id| f.name(*id).into()).collect(),
        operations: b.ops.iter().map(|o| op(f, o, place)).collect::<Result<_>>()?,
        attributes: attributes(&b.attrs, place)?,
    })
}

fn op(f: &Function, op: &Op, place: Place<'_>) -> Result<pb::Operation> {
    let mut inputs = BTreeMap::new();
    for (name, args) in &op.params {
        let arguments = args.iter().map(|a| binding(f, a, place)).collect::<Result<_>>()?;
        inputs.insert(name.clone(), pb::Argument { arguments });
    }
    Ok(pb::Operation {
        r#type: op.kind.clone(),
        inputs,
        outputs: values(f, &op.outputs, place)?,
        blocks: op.blocks.iter().map(|b| block(f, b, place)).collect::<Result<_>>()?,
        attributes: attributes(&op.attrs, place)?,
    })
}

fn binding(f: &Function, arg: &Arg, place: Place<'_>) -> Result<pb::argument::Binding> {
    use pb::argument::binding::Binding;
    let binding = match arg {
        Arg::Value(id) => Binding::Name(f.name(*id).into()),
        Arg::Const(c) => Binding::Value(constant(c, place)?),
    };
    Ok(pb::argument::Binding { binding: Some(binding) })
}

fn values(f: &Function, ids: &[ValueId], place: Place<'_>) -> Result<Vec<pb::NamedValueType>> {
    ids.iter()
        .map(|id| {
            let v = f.value(*id);
            Ok(pb::NamedValueType { name: v.name.clone(), r#type: ty(&v.ty, place)? })
        })
        .collect()
}

fn attributes(attrs: &BTreeMap<String, Const>, place: Place<'_>) -> Result<BTreeMap<String, pb::Value>> {
    attrs.iter().map(|(name, c)| Ok((name.clone(), constant(c, place)?))).collect()
}

fn constant(c: &Const, place: Place<'_>) -> Result<pb::Value> {
    let value = match &c.data {
        Data::Literal(l) => literal(l, place)?.map(pb::value::Value::ImmediateValue),
        Data::Weight(w) => {
            let (file_name, offset) = place(w)?;
            Some(pb::value::Value::BlobFileValue(pb::value::BlobFile { file_name, offset }))
        }
    };
    Ok(pb::Value { doc_string: c.doc.clone(), r#type: ty(&c.ty, place)?, value })
}

fn literal(l: &Literal, place: Place<'_>) -> Result<Option<pb::value::Immediate>> {
    use pb::{tensor_value as t, value::immediate::Value as V};
    let mut constants = |values: &[Const]| values.iter().map(|c| constant(c, place)).collect::<Result<_>>();
    let tensor = |value| V::Tensor(pb::TensorValue { value });
    let value = match l {
        Literal::Missing => return Ok(None),
        Literal::Empty => tensor(None),
        Literal::Bools(v) => tensor(Some(t::Value::Bools(t::Bools { values: v.clone() }))),
        Literal::Ints(v) => tensor(Some(t::Value::Ints(t::Ints { values: v.clone() }))),
        Literal::Longs(v) => tensor(Some(t::Value::LongInts(t::LongInts { values: v.clone() }))),
        Literal::Floats(v) => tensor(Some(t::Value::Floats(t::Floats { values: v.clone() }))),
        Literal::Doubles(v) => tensor(Some(t::Value::Doubles(t::Doubles { values: v.clone() }))),
        Literal::Strings(v) => tensor(Some(t::Value::Strings(t::Strings { values: v.clone() }))),
        Literal::Bytes(v) => tensor(Some(t::Value::Bytes(t::Bytes { values: v.clone() }))),
        Literal::Tuple(v) => V::Tuple(pb::TupleValue { values: constants(v)? }),
        Literal::List(v) => V::List(pb::ListValue { values: constants(v)? }),
        Literal::Dict(v) => {
            let pair = |(k, v): &(Const, Const)| {
                let (key, value) = (Some(constant(k, place)?), Some(constant(v, place)?));
                Ok(pb::dictionary_value::KeyValuePair { key, value })
            };
            V::Dictionary(pb::DictionaryValue { values: v.iter().map(pair).collect::<Result<_>>()? })
        }
    };
    Ok(Some(pb::value::Immediate { value: Some(value) }))
}

fn ty(t: &Type, place: Place<'_>) -> Result<Option<pb::ValueType>> {
    use pb::value_type::Type as T;
    let mut boxed = |t: &Type| Ok::<_, crate::Error>(ty(t, place)?.map(Box::new));
    let wire = match t {
        Type::Unset => return Ok(None),
        Type::Tensor(t) => T::TensorType(tensor(t, place)?),
        Type::List { element, length } => {
            T::ListType(Box::new(pb::ListType { r#type: boxed(element)?, length: length.map(dim) }))
        }
        Type::Tuple(types) => {
            let types = types.iter().map(|t| Ok(ty(t, place)?.unwrap_or_default())).collect::<Result<_>>()?;
            T::TupleType(pb::TupleType { types })
        }
        Type::Dict(k, v) => {
            T::DictionaryType(Box::new(pb::DictionaryType { key_type: boxed(k)?, value_type: boxed(v)? }))
        }
        Type::State(t) => T::StateType(Box::new(pb::StateType { wrapped_type: boxed(t)? })),
    };
    Ok(Some(pb::ValueType { r#type: Some(wire) }))
}

fn tensor(t: &TensorType, place: Place<'_>) -> Result<pb::TensorType> {
    Ok(pb::TensorType {
        data_type: DTYPES.iter().find(|(d, _)| *d == t.dtype).map_or(0, |(_, code)| *code),
        rank: i64::try_from(t.dims.len()).unwrap_or(i64::MAX),
        dimensions: t.dims.iter().map(|d| dim(*d)).collect(),
        attributes: attributes(&t.attrs, place)?,
    })
}

fn dim(d: Dim) -> pb::Dimension {
    use pb::dimension::{Constant, Dimension, Unknown};
    let dimension = match d {
        Dim::Fixed(n) => Dimension::Constant(Constant { size: n as u64 }),
        Dim::Unknown { variadic } => Dimension::Unknown(Unknown { variadic }),
    };
    pb::Dimension { dimension: Some(dimension) }
}
