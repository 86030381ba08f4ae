//! Raising a program to a newer opset: parameters that came since are written out, and compressed weights
//! take the newer form, which holds the same bytes.

use std::collections::BTreeMap;

use crate::{
    bail,
    error::{Context, Result},
    mil::{Arg, Const, DType, Data, Function, Op, Program, TensorType, Type, Weight},
    ops::{self, Need, Opset},
};

/// Raises all functions to `to`, unless they are there; gives what is worth knowing.
pub fn raise(program: &mut Program, to: Opset) -> Result<Vec<String>> {
    let mut notes = Vec::new();
    for (name, function) in &mut program.functions {
        let Some(from) = Opset::from_wire(&function.opset) else {
            bail!("{name}: the opset `{}` is not known", function.opset);
        };
        if from >= to {
            continue;
        }
        if !function.other_bodies.is_empty() {
            bail!("{name}: the function has bodies for several opsets, only one can be raised");
        }
        let mut body = std::mem::take(&mut function.body);
        let mut done = Ok(());
        let mut negative = false;
        body.walk_mut(&mut |op| {
            let raised = raise_op(function, op, (from, to), &mut negative);
            if done.is_ok() {
                done = raised.at(op.name()).at(name);
            }
        });
        function.body = body;
        done?;
        function.opset = to.wire().into();
        if negative {
            notes.push(format!(
                "{name}: from {} on, a `gather` of negative indices is undefined, and some are computed; the program must not make any",
                Opset::Ios17
            ));
        }
    }
    Ok(notes)
}

fn raise_op(function: &Function, op: &mut Op, span: (Opset, Opset), negative: &mut bool) -> Result<()> {
    let (from, to) = span;
    if op.kind == "const" {
        return Ok(());
    }
    let Some(spec) = ops::find(&op.kind) else {
        bail!("`{}` is not known, so nobody can say what it takes from {to} on", op.kind; hint: "leave the program as it is, and take a scheme that it can hold");
    };
    if op.kind.starts_with("constexpr_") {
        return if from < Opset::Ios18 && to >= Opset::Ios18 { newer_form(function, op) } else { Ok(()) };
    }
    let dtype = |arg: &Arg| match arg {
        Arg::Value(id) => function.ty(*id).as_tensor().map(|t| t.dtype),
        Arg::Const(c) => c.ty.as_tensor().map(|t| t.dtype),
    };
    let first = spec.params.first().and_then(|p| op.params.get(p.name)).and_then(|a| a.first());
    let x = first.and_then(dtype).unwrap_or(DType::F16);
    for p in spec.params.iter().filter(|p| p.since > from && p.since <= to) {
        if let (Need::Written(preset), false) = (p.need, op.params.contains_key(p.name))
            && let Some(value) = preset.constant(x)
        {
            op.params.insert(p.name.into(), vec![Arg::Const(value)]);
        }
    }
    let computed = |args: &Vec<Arg>| args.iter().any(|a| matches!(a, Arg::Value(_)));
    let looks_up = ["gather", "gather_along_axis", "gather_nd"].contains(&op.kind.as_str());
    *negative |= looks_up
        && from < Opset::Ios17
        && to >= Opset::Ios17
        && op.params.get("indices").is_some_and(computed);
    Ok(())
}

/// The form of iOS 18: parameters are inputs, codes have narrow types and the weight's shape.
fn newer_form(function: &Function, op: &mut Op) -> Result<()> {
    let [id] = op.outputs[..] else { bail!("{} has {} results", op.kind, op.outputs.len()) };
    let Some(shape) = function.ty(id).as_tensor().and_then(TensorType::shape) else {
        bail!("{} has a result of unknown size", op.kind);
    };
    let mut attrs = std::mem::take(&mut op.attrs);
    let mut new: BTreeMap<String, Const> = BTreeMap::new();
    if let Some(name) = attrs.remove("name") {
        op.attrs.insert("name".into(), name);
    }
    let mut take = |name: &str| match attrs.remove(name) {
        Some(c) => Ok(c),
        None => bail!("{} has no `{name}`", op.kind),
    };
    match op.kind.as_str() {
        "constexpr_affine_dequantize" => {
            let axis = take("axis")?.numbers()?.into_ints().first().copied().unwrap_or(0);
            let axis = ops::axis_of(axis, shape.len())?;
            let along = |c: Const| {
                let mut dims = vec![1; shape.len()];
                let count = c.ty.as_tensor().and_then(TensorType::count).unwrap_or(1);
                dims[axis] = count;
                let dtype = c.ty.as_tensor().map_or(DType::F16, |t| t.dtype);
                retyped(c, dtype, dims)
            };
            new.insert("data".into(), take("quantized_data")?);
            let (scale, zero) = (take("scale")?, take("zero_point")?);
            // A scale for all may go with zero points for each, and the other way round.
            let sizes = |c: &Const| c.ty.as_tensor().and_then(TensorType::count).unwrap_or(1);
            if sizes(&scale) != sizes(&zero) {
                bail!("{} scales and {} zero points have no newer form", sizes(&scale), sizes(&zero); hint: "`--decompress` makes the weights dense first");
            }
            new.insert("scale".into(), along(scale)?);
            new.insert("offset".into(), along(zero)?);
            op.kind = "constexpr_blockwise_shift_scale".into();
        }
        "constexpr_lut_to_dense" => {
            take("shape")?;
            let lut = take("lut")?;
            let entries = lut.ty.as_tensor().and_then(TensorType::count).unwrap_or(0);
            let dtype = match entries {
                2 => DType::U1,
                4 => DType::U2,
                16 => DType::U4,
                64 => DType::U6,
                256 => DType::U8,
                n => bail!("a table of {n} entries"),
            };
            let entry = lut.ty.as_tensor().map_or(DType::F16, |t| t.dtype);
            let dims = [vec![1; shape.len()].as_slice(), &[entries, 1]].concat();
            new.insert("lut".into(), retyped(lut, entry, dims)?);
            new.insert("indices".into(), retyped(take("indices")?, dtype, shape)?);
        }
        "constexpr_sparse_to_dense" => {
            take("shape")?;
            new.insert("nonzero_data".into(), take("nonzero_data")?);
            new.insert("mask".into(), retyped(take("mask")?, DType::U1, shape)?);
        }
        _ => new.append(&mut attrs),
    }
    op.params = new.into_iter().map(|(name, c)| (name, vec![Arg::Const(c)])).collect();
    Ok(())
}

/// The same bytes as another type.
fn retyped(c: Const, dtype: DType, shape: Vec<usize>) -> Result<Const> {
    let Const { ty, data, doc } = c;
    let count = shape.iter().product();
    let (old, new) = (ty.as_tensor().and_then(|t| t.dtype.packed_len(t.count()?)), dtype.packed_len(count));
    if old != new {
        bail!("{ty} does not hold {count} elements of {dtype}");
    }
    let to = Type::tensor(dtype, shape.iter().copied());
    let data = match data {
        Data::Literal(l) => Data::Literal(l),
        Data::Weight(w) => {
            // Another type of the same file's bytes is another weight.
            Data::Weight(Weight::new(format!("{} as {to}", w.key), dtype, shape, move || w.bytes()))
        }
    };
    Ok(Const { ty: to, data, doc })
}
