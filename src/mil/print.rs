//! MIL text: a program as people read it, close to what Apple's compiler prints.

use std::{
    collections::BTreeMap,
    fmt::{self, Display, Write},
};

use super::{
    Arg, Block, Const, Data, Function, Literal, Numbers, Op, Program, TensorType, Type, ValueId,
    types::shape_text,
};

/// Where a parameter of an op comes among its parameters: `order(op, parameter)`.
pub type Order<'a> = &'a dyn Fn(&str, &str) -> usize;

/// The text of a program; long constants are cut short, and weights are named by their key.
pub fn text(program: &Program, order: Order<'_>) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = Printer { out: &mut out, order }.program(program);
    out
}

/// How many elements of a constant are shown.
const SHOWN: usize = 16;

struct Printer<'a> {
    out: &'a mut String,
    order: Order<'a>,
}

impl Printer<'_> {
    fn program(&mut self, p: &Program) -> fmt::Result {
        writeln!(self.out, "program(1.0)\n{}{{", attributes(&p.attrs, "", "\n"))?;
        for (name, f) in &p.functions {
            let inputs: Vec<String> = f.inputs.iter().map(|id| named(f, *id)).collect();
            let default = if *name == p.default_function { " // the default" } else { "" };
            write!(self.out, "    func {name}<{}>({})", f.opset, inputs.join(", "))?;
            writeln!(self.out, "{} {{{default}", attributes(&f.attrs, " ", ""))?;
            self.body(f, &f.body, 2)?;
            writeln!(self.out, "    }} -> ({});", names(f, &f.body.outputs))?;
        }
        self.out.write_str("}\n")
    }

    fn body(&mut self, f: &Function, block: &Block, depth: usize) -> fmt::Result {
        for op in &block.ops {
            self.op(f, op, depth)?;
        }
        Ok(())
    }

    fn op(&mut self, f: &Function, op: &Op, depth: usize) -> fmt::Result {
        let indent = "    ".repeat(depth);
        let outputs: Vec<String> = op.outputs.iter().map(|id| named(f, *id)).collect();
        let equals = if outputs.is_empty() { "" } else { " = " };
        let mut params: Vec<_> = op.params.iter().collect();
        params.sort_by_key(|(name, _)| (self.order)(&op.kind, name));
        let params: Vec<String> = params.into_iter().map(|(name, args)| parameter(f, name, args)).collect();
        write!(self.out, "{indent}{}{equals}{}({})", outputs.join(", "), op.kind, params.join(", "))?;
        self.out.write_str(&attributes(&op.attrs, "", ""))?;
        for (i, block) in op.blocks.iter().enumerate() {
            let inputs: Vec<String> = block.inputs.iter().map(|id| named(f, *id)).collect();
            writeln!(self.out, "\n{indent}block{i}({}) {{", inputs.join(", "))?;
            self.body(f, block, depth + 1)?;
            write!(self.out, "{indent}}} -> ({})", names(f, &block.outputs))?;
        }
        self.out.write_str(";\n")
    }
}

fn named(f: &Function, id: ValueId) -> String {
    format!("{} {}", Spelt(f.ty(id)), f.name(id))
}

fn names(f: &Function, ids: &[ValueId]) -> String {
    ids.iter().map(|id| f.name(*id)).collect::<Vec<_>>().join(", ")
}

fn parameter(f: &Function, name: &str, args: &[Arg]) -> String {
    let arg = |arg: &Arg| match arg {
        Arg::Value(id) => f.name(*id).to_string(),
        Arg::Const(c) => constant(c),
    };
    match args {
        [one] => format!("{name} = {}", arg(one)),
        many => format!("{name} = ({})", many.iter().map(arg).collect::<Vec<_>>().join(", ")),
    }
}

fn attributes(attrs: &BTreeMap<String, Const>, before: &str, after: &str) -> String {
    let attrs: Vec<String> = attrs.iter().map(|(name, c)| format!("{name} = {}", constant(c))).collect();
    if attrs.is_empty() { String::new() } else { format!("{before}[{}]{after}", attrs.join(", ")) }
}

fn constant(c: &Const) -> String {
    let value = match &c.data {
        Data::Weight(w) => format!("weight({:?})", w.key),
        Data::Literal(l) => literal(c, l),
    };
    format!("{}({value})", Spelt(&c.ty))
}

fn literal(c: &Const, l: &Literal) -> String {
    match l {
        Literal::Bools(v) => list(c, v),
        Literal::Ints(v) => list(c, v),
        Literal::Longs(v) => list(c, v),
        Literal::Floats(v) => list(c, v),
        Literal::Doubles(v) => list(c, v),
        Literal::Strings(v) => list(c, &v.iter().map(|s| format!("{s:?}")).collect::<Vec<_>>()),
        Literal::Bytes(v) => match c.numbers() {
            Ok(Numbers::Floats(v)) => list(c, &v),
            Ok(Numbers::Ints(v)) => list(c, &v),
            Ok(Numbers::Bools(v)) => list(c, &v),
            Err(_) => format!("{} bytes", v.len()),
        },
        Literal::Tuple(v) | Literal::List(v) => {
            let shown: Vec<String> = v.iter().take(SHOWN).map(constant).collect();
            format!("({}{})", shown.join(", "), more(v.len()))
        }
        Literal::Dict(v) => {
            let pair = |(k, v): &(Const, Const)| format!("{{{}, {}}}", constant(k), constant(v));
            format!("{{{}}}", v.iter().map(pair).collect::<Vec<_>>().join(", "))
        }
        Literal::Empty | Literal::Missing => String::new(),
    }
}

fn list<T: Display>(c: &Const, values: &[T]) -> String {
    let shown: Vec<String> = values.iter().take(SHOWN).map(ToString::to_string).collect();
    match (&c.ty, values) {
        (Type::Tensor(t), [one]) if t.rank() == 0 => one.to_string(),
        _ => format!("[{}{}]", shown.join(", "), more(values.len())),
    }
}

fn more(count: usize) -> String {
    if count > SHOWN { format!(", … {count} in all") } else { String::new() }
}

/// A type as MIL text spells it.
struct Spelt<'a>(&'a Type);

impl Display for Spelt<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Type::Tensor(TensorType { dtype, dims, .. }) if dims.is_empty() => write!(f, "{dtype}"),
            Type::Tensor(TensorType { dtype, dims, .. }) => {
                write!(f, "tensor<{dtype}, {}>", shape_text(dims))
            }
            Type::List { element, length } => {
                let length = length.map_or_else(|| "?".into(), |n| n.to_string());
                write!(f, "list<{}, {length}>", Spelt(element))
            }
            Type::Tuple(types) => {
                let types: Vec<String> = types.iter().map(|t| Spelt(t).to_string()).collect();
                write!(f, "tuple<{}>", types.join(", "))
            }
            Type::Dict(k, v) => write!(f, "dict<{}, {}>", Spelt(k), Spelt(v)),
            Type::State(t) => write!(f, "state<{}>", Spelt(t)),
            Type::Unset => f.write_str("any"),
        }
    }
}
