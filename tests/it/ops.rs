//! Every op against numbers from elsewhere: the cases of `fixtures/ops`, whose script says how they are made.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};

use serde::Deserialize;
use silane::{
    graph::{Builder, In},
    mil::{Arg, Const, DType, Dim, Literal, Numbers, Type, constant::encode_ints},
    ops::{self, Call, Eval, Opset, Spec, Tolerance, Val},
};

/// Ops that other tests cover, most of them through whole functions: blocks, states and lists do not fit
/// in a case. An op with a case of its own may not be listed.
const ELSEWHERE: &[&str] = &[
    "classify",
    "cond",
    "const",
    "list_gather",
    "list_length",
    "list_read",
    "list_scatter",
    "list_write",
    "make_list",
    "non_maximum_suppression",
    "read_state",
    "while_loop",
    "write_state",
];

#[derive(Deserialize, Clone)]
struct Case {
    op: String,
    inputs: BTreeMap<String, Operand>,
    params: BTreeMap<String, Tensor>,
    #[serde(default)]
    outputs: Vec<Tensor>,
    #[serde(default)]
    error: String,
}

#[derive(Deserialize, Clone)]
#[serde(untagged)]
enum Operand {
    One(Tensor),
    Many(Vec<Tensor>),
}

#[derive(Deserialize, Clone)]
struct Tensor {
    t: String,
    s: Vec<Option<usize>>,
    d: Option<Vec<serde_json::Value>>,
}

/// A case with its op bound to arguments.
struct Bound {
    op: silane::mil::Op,
    types: Vec<Type>,
    args: BTreeMap<String, Vec<Val>>,
}

#[test]
fn results_have_the_types_and_values_of_the_cases() {
    for (place, case) in cases().into_iter().filter(|(_, c)| c.error.is_empty()) {
        let spec = ops::find(&case.op).unwrap_or_else(|| panic!("{place}: no op {}", case.op));
        let bound = bind(&case).unwrap_or_else(|e| panic!("{place}: {e}"));
        let wanted: Vec<Type> = case.outputs.iter().map(Tensor::ty).collect();
        assert_eq!(bound.types, wanted, "{place}: types");
        if case.outputs.iter().any(|t| t.d.is_none()) {
            continue;
        }
        let results = run(spec, &bound).unwrap_or_else(|e| panic!("{place}: {e}"));
        assert_eq!(results.len(), wanted.len(), "{place}: number of results");
        for (result, want) in results.iter().zip(&case.outputs) {
            compare(&place, spec.tolerance, result, want);
        }
    }
}

#[test]
fn refusals_say_what_is_wrong() {
    let refused: Vec<_> = cases().into_iter().filter(|(_, c)| !c.error.is_empty()).collect();
    assert!(refused.len() > 20);
    for (place, case) in refused {
        match bind(&case) {
            Ok(_) => panic!("{place}: accepted, `{}` is expected", case.error),
            Err(e) => assert!(e.message().contains(&case.error), "{place}: `{e}` lacks `{}`", case.error),
        }
    }
}

#[test]
fn every_op_has_a_case() {
    let tested: BTreeSet<String> = cases().into_iter().map(|(_, c)| c.op).collect();
    let untested: Vec<&str> = ops::all()
        .filter(|s| !matches!(s.eval, Eval::Flow | Eval::Unknown))
        .map(|s| s.name)
        .filter(|n| !tested.contains(*n) && !ELSEWHERE.contains(n))
        .collect();
    assert!(untested.is_empty(), "no case in fixtures/ops for {untested:?}");
    let both: Vec<_> = ELSEWHERE.iter().filter(|n| tested.contains(**n)).collect();
    assert!(both.is_empty(), "{both:?} have cases, they need not be listed");
}

#[test]
fn names_and_parameters_are_unique() {
    let mut names = BTreeSet::new();
    for spec in ops::all() {
        assert!(names.insert(spec.name), "{} is twice in the table", spec.name);
        let mut params = BTreeSet::new();
        for p in spec.params {
            assert!(params.insert(p.name), "{} has `{}` twice", spec.name, p.name);
            assert!(p.since <= Opset::Ios26 && !p.accepts.list().is_empty(), "{}.{}", spec.name, p.name);
        }
    }
}

/// Whatever a parameter is, the answer is a result or an error.
#[test]
fn hostile_arguments_never_panic() {
    let hostile: Vec<Tensor> = [
        r#"{"t":"int32","s":[],"d":[0]}"#,
        r#"{"t":"int32","s":[],"d":[-1]}"#,
        r#"{"t":"int32","s":[2],"d":[2147483647,2147483647]}"#,
        r#"{"t":"int32","s":[4],"d":[2147483647,0,-2147483648,1]}"#,
        r#"{"t":"int32","s":[0],"d":[]}"#,
        r#"{"t":"fp32","s":[],"d":["nan"]}"#,
        r#"{"t":"fp32","s":[1,0,2,1],"d":[]}"#,
        r#"{"t":"fp32","s":[3,2],"d":["inf",0,-1,"-inf",1e30,2]}"#,
        r#"{"t":"bool","s":[2],"d":[true,false]}"#,
        r#"{"t":"string","s":[],"d":["x"]}"#,
    ]
    .into_iter()
    .map(|t| serde_json::from_str(t).unwrap())
    .collect();
    let mut seen = BTreeSet::new();
    for (_, case) in
        cases().into_iter().filter(|(_, c)| c.error.is_empty() && c.outputs.iter().all(|t| t.d.is_some()))
    {
        let spec = ops::find(&case.op).unwrap();
        let names: Vec<&String> = case.inputs.keys().chain(case.params.keys()).collect();
        for (name, (i, bad)) in
            names.into_iter().flat_map(|n| hostile.iter().enumerate().map(move |b| (n, b)))
        {
            // One case of each op and parameter is enough.
            if !seen.insert((case.op.clone(), name.clone(), i)) {
                continue;
            }
            let mut bound = bind(&case).unwrap();
            bound.args.insert(name.clone(), vec![bad.val()]);
            let _ = run(spec, &bound);
            let mut changed = case.clone();
            changed.inputs.remove(name);
            changed.params.insert(name.clone(), bad.clone());
            let _ = bind(&changed);
        }
    }
}

fn cases() -> Vec<(String, Case)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fixtures/ops");
    let mut files: Vec<PathBuf> = fs::read_dir(folder).unwrap().map(|f| f.unwrap().path()).collect();
    files.sort();
    let mut all = Vec::new();
    for file in files.iter().filter(|f| f.extension().is_some_and(|e| e == "json")) {
        let cases: Vec<Case> = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
        let stem = file.file_stem().unwrap().to_string_lossy().to_string();
        all.extend(cases.into_iter().enumerate().map(|(i, c)| (format!("{stem} {i} {}", c.op), c)));
    }
    assert!(!all.is_empty());
    all
}

/// Builds a function of the one op, which infers its types.
fn bind(case: &Case) -> silane::error::Result<Bound> {
    let mut b = Builder::new(Opset::Ios26);
    let mut given: Vec<(&str, In)> = Vec::new();
    let mut args = BTreeMap::new();
    for (name, operand) in &case.inputs {
        let tensors = match operand {
            Operand::One(t) => std::slice::from_ref(t),
            Operand::Many(t) => t,
        };
        let ids = tensors
            .iter()
            .enumerate()
            .map(|(i, t)| b.input(&format!("{name}_{i}"), t.ty()))
            .collect::<silane::error::Result<Vec<_>>>()?;
        given.push((name, In::from(ids.as_slice())));
        args.insert(
            name.clone(),
            tensors.iter().filter(|t| t.d.is_some()).map(Tensor::val).collect::<Vec<_>>(),
        );
    }
    for (name, t) in &case.params {
        given.push((name, In::from(t.constant())));
    }
    given.resize(32, ("", In::none()));
    let given: [(&str, In); 32] = given.try_into().unwrap_or_else(|_| panic!("too many parameters"));
    let outputs = b.ops(&case.op, "case", given)?;
    let types = outputs.iter().map(|id| b.ty(*id).clone()).collect();
    let op = b.finish(outputs).body.ops.pop().unwrap();
    // The builder has filled defaults in.
    for (name, list) in &op.params {
        if let [Arg::Const(c)] = list.as_slice() {
            args.insert(name.clone(), vec![Val::constant(c)?]);
        }
    }
    Ok(Bound { op, types, args })
}

fn run(spec: &Spec, bound: &Bound) -> silane::error::Result<Vec<Val>> {
    let args = bound.args.iter().map(|(n, v)| (n.as_str(), v.clone())).collect();
    let call = Call { op: &bound.op, args, outputs: bound.types.iter().collect() };
    match spec.eval {
        Eval::Unary(f) => Ok(vec![f(call.tensor("x")?)?.into()]),
        Eval::Binary(f) => Ok(vec![f(call.tensor("x")?, call.tensor("y")?)?.into()]),
        Eval::Call(f) => f(&call),
        Eval::Flow | Eval::Unknown => panic!("{} has no meaning of its own", spec.name),
    }
}

fn compare(place: &str, tolerance: Tolerance, got: &Val, want: &Tensor) {
    let shape: Vec<usize> = want.s.iter().flatten().copied().collect();
    if let Val::Str(s) = got {
        assert_eq!(want.d.as_ref().unwrap()[0].as_str(), Some(s.as_str()), "{place}");
        return;
    }
    let tensor = got.tensor().unwrap();
    assert_eq!(tensor.dims(), shape, "{place}: shape");
    let (kind, wide) = match want.numbers() {
        Numbers::Floats(_) => (candle_core::DType::F32, true),
        Numbers::Ints(_) => (candle_core::DType::I64, false),
        Numbers::Bools(_) => (candle_core::DType::U8, false),
    };
    assert_eq!(tensor.dtype(), kind, "{place}: kind of value");
    let (got, want) = (got.to_floats().unwrap(), want.numbers().into_floats());
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        let near = match tolerance {
            Tolerance::Rounding if wide => (g - w).abs() <= 2e-5 * w.abs().max(0.05),
            _ => false,
        };
        assert!(g == w || near || (g.is_nan() && w.is_nan()), "{place}: element {i} is {g}, {w} is expected");
    }
}

impl Tensor {
    fn dtype(&self) -> DType {
        DType::from_name(&self.t).unwrap()
    }

    fn ty(&self) -> Type {
        Type::tensor(self.dtype(), self.s.iter().map(|n| n.map_or(Dim::ANY, Dim::Fixed)))
    }

    fn numbers(&self) -> Numbers {
        let d = self.d.as_deref().unwrap();
        let float = |v: &serde_json::Value| match v.as_str() {
            Some(s) => s.parse::<f32>().unwrap(),
            None => v.as_f64().unwrap() as f32,
        };
        match self.dtype() {
            DType::Bool => Numbers::Bools(d.iter().map(|v| v.as_bool().unwrap()).collect()),
            t if t.is_float() => Numbers::Floats(d.iter().map(float).collect()),
            _ => Numbers::Ints(d.iter().map(|v| v.as_i64().unwrap()).collect()),
        }
    }

    fn constant(&self) -> Const {
        let shape: Vec<usize> = self.s.iter().map(|n| n.unwrap()).collect();
        if self.dtype() == DType::String {
            return Const::string(self.d.as_ref().unwrap()[0].as_str().unwrap());
        }
        match (self.numbers(), self.dtype()) {
            (Numbers::Floats(v), t) => Const::floats(t, &shape, &v),
            (Numbers::Bools(v), _) => Const::literal(self.ty(), Literal::Bools(v)),
            (Numbers::Ints(v), DType::I32 | DType::I16 | DType::U16) => {
                Const::literal(self.ty(), Literal::Ints(v.into_iter().map(|i| i as i32).collect()))
            }
            (Numbers::Ints(v), t) => Const::literal(self.ty(), Literal::Bytes(encode_ints(t, &v).unwrap())),
        }
    }

    fn val(&self) -> Val {
        Val::constant(&self.constant()).unwrap()
    }
}
