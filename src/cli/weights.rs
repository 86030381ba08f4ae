//! Weights of a package: a list, and one of them decoded to `.npy`.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::Path,
};

use crate::{
    bail,
    error::Result,
    interp::{Machine, Precision},
    mil::{Arg, Const, Data, Function, Op, Program, Type, ValueId},
    ops::Val,
    ui,
};

/// One row a weight: name, type, bits per element, bytes.
pub(super) fn table(program: &Program) -> String {
    let mut rows = vec![["name", "type", "stored as", "bits/weight", "bytes"].map(String::from).to_vec()];
    for function in program.functions.values() {
        for stored in weights(function) {
            let ty = function.ty(stored.id);
            let bytes: usize = stored.blobs.iter().filter_map(|w| w.dtype.packed_len(w.count())).sum();
            let forms: Vec<String> = stored.blobs.iter().map(|w| w.ty().to_string()).collect();
            let count = ty.as_tensor().and_then(|t| t.count()).unwrap_or(0).max(1);
            #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
            let bits = bytes as f64 * 8.0 / count as f64;
            let kinds: Vec<&str> = stored.kinds.iter().map(|k| k.trim_start_matches("constexpr_")).collect();
            let form = match kinds.as_slice() {
                ["const"] => forms.join(" + "),
                kinds => format!("{}: {}", kinds.join(", "), forms.join(" + ")),
            };
            rows.push(vec![
                function.name(stored.id).into(),
                ty.to_string(),
                form,
                format!("{bits:.2}"),
                bytes.to_string(),
            ]);
        }
    }
    ui::table(&rows)
}

/// Decodes one weight, whatever it is stored as, to fp32 or integers.
pub(super) fn dump(program: &Program, name: &str, file: &Path) -> Result<()> {
    let found = program.functions.values().find_map(|f| {
        let stored = weights(f).into_iter().find(|w| f.name(w.id) == name)?;
        Some((f, stored.id))
    });
    let Some((function, id)) = found else {
        bail!("there is no weight `{name}`"; hint: "`silane inspect PACKAGE --weights` lists them");
    };
    let value = decode(function, id)?;
    let tensor = value.tensor()?;
    let (kind, data): (&str, Vec<u8>) = match function.ty(id) {
        Type::Tensor(t) if t.dtype.is_float() => {
            ("<f4", value.to_floats()?.iter().flat_map(|v| v.to_le_bytes()).collect())
        }
        _ => ("<i8", value.to_ints()?.iter().flat_map(|v| v.to_le_bytes()).collect()),
    };
    super::write_beside(file, &npy(kind, tensor.dims(), &data))
}

/// Runs only what makes the value: constants and what expands them.
fn decode(function: &Function, id: ValueId) -> Result<Val> {
    let mut alone = function.clone();
    alone.inputs.clear();
    let mut needed = HashSet::from([id]);
    let mut ops = Vec::new();
    for op in alone.body.ops.into_iter().rev().filter(|op| is_constant(&op.kind)) {
        if op.outputs.iter().any(|o| needed.contains(o)) {
            needed.extend(op.args().filter_map(value_of));
            ops.push(op);
        }
    }
    ops.reverse();
    alone.body.ops = ops;
    alone.body.outputs = vec![id];
    let name = function.name(id).to_string();
    let program = Program { functions: BTreeMap::from([("main".to_string(), alone)]), ..Program::default() };
    let mut machine = Machine::new(&program, Precision::Fp16);
    let mut states = machine.states("main")?;
    let outputs = machine.run("main", &BTreeMap::new(), &mut states, None)?;
    match outputs.into_iter().find(|(n, _)| *n == name) {
        Some((_, value)) => Ok(value),
        None => bail!("`{name}` was not computed"),
    }
}

fn is_constant(kind: &str) -> bool {
    kind == "const" || kind.starts_with("constexpr_")
}

fn value_of(arg: &Arg) -> Option<ValueId> {
    match arg {
        Arg::Value(id) => Some(*id),
        Arg::Const(_) => None,
    }
}

/// A weight as the program has it.
struct Stored<'a> {
    id: ValueId,
    /// The ops that make it, the last one first.
    kinds: Vec<&'a str>,
    blobs: Vec<&'a crate::mil::Weight>,
}

/// What const and constexpr ops make of weight blobs. What only another constexpr op reads is a piece of
/// its result.
fn weights(function: &Function) -> Vec<Stored<'_>> {
    let mut pieces = HashMap::new();
    let mut read = HashSet::new();
    let mut found: Vec<Stored<'_>> = Vec::new();
    function.body.walk(&mut |op| {
        if !is_constant(&op.kind) {
            read.extend(op.args().filter_map(value_of));
            read.extend(op.blocks.iter().flat_map(|b| &b.outputs));
            return;
        }
        let mut kinds = vec![op.kind.as_str()];
        let mut held: Vec<&crate::mil::Weight> = blobs(op).collect();
        // Both results of a sparse op are pieces of the same weight.
        let mut makers: Vec<usize> =
            op.args().filter_map(value_of).filter_map(|id| pieces.get(&id).copied()).collect();
        makers.sort_unstable();
        makers.dedup();
        for i in makers {
            kinds.extend(&found[i].kinds);
            held.extend(&found[i].blobs);
        }
        if let (Some(id), false) = (op.outputs.last(), held.is_empty()) {
            pieces.extend(op.outputs.iter().map(|id| (*id, found.len())));
            found.push(Stored { id: *id, kinds, blobs: held });
        }
    });
    read.extend(&function.body.outputs);
    let fed: HashSet<ValueId> = fed(function);
    found.retain(|w| read.contains(&w.id) || !fed.contains(&w.id));
    found
}

/// Values that constexpr ops read.
fn fed(function: &Function) -> HashSet<ValueId> {
    let mut fed = HashSet::new();
    function.body.walk(&mut |op| {
        if op.kind.starts_with("constexpr_") {
            fed.extend(op.args().filter_map(value_of));
        }
    });
    fed
}

fn blobs(op: &Op) -> impl Iterator<Item = &crate::mil::Weight> {
    let bound = op.args().filter_map(|a| match a {
        Arg::Const(c) => Some(c),
        Arg::Value(_) => None,
    });
    op.attrs.values().chain(bound).filter_map(|c: &Const| match &c.data {
        Data::Weight(w) => Some(w),
        Data::Literal(_) => None,
    })
}

/// The NumPy format, version 1.0: magic, header length, a Python literal padded to 64 bytes, data.
fn npy(kind: &str, shape: &[usize], data: &[u8]) -> Vec<u8> {
    let dims: String = shape.iter().map(|d| format!("{d},")).collect();
    let mut header = format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({dims}), }}");
    let padding = 64 - (10 + header.len() + 1) % 64;
    header.push_str(&" ".repeat(padding % 64));
    header.push('\n');
    let length = u16::try_from(header.len()).unwrap_or(u16::MAX);
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend(length.to_le_bytes());
    file.extend(header.as_bytes());
    file.extend(data);
    file
}
