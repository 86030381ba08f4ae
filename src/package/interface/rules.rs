//! The rules that Core ML's own validator has for interfaces, and that interface and program agree.

use std::collections::BTreeSet;

use super::{
    Array, ColorSpace, DefaultValue, Feature, FeatureType, FunctionInterface, Image, Interface, Sizes,
};
use crate::{
    graph::{Problem, Severity},
    mil::{DType, Dim, Function, Program, TensorType, Type, types::shape_text},
    ops::Opset,
};

/// Everything in the interface that Core ML refuses for a program of this specification version.
pub fn problems(interface: &Interface, program: &Program, spec_version: i32) -> Vec<Problem> {
    let mut rules = Rules { spec_version, place: "model".into(), found: Vec::new() };
    rules.model(interface, program);
    for f in interface.functions.iter().filter(|f| !f.name.is_empty()) {
        rules.place.clone_from(&f.name);
        rules.function(f);
        if let Some(function) = program.functions.get(&f.name) {
            rules.agreement(f, function);
        }
    }
    rules.found
}

struct Rules {
    spec_version: i32,
    /// The function that is looked at.
    place: String,
    found: Vec<Problem>,
}

impl Rules {
    fn add(&mut self, rule: &'static str, message: String) {
        self.found.push(Problem { severity: Severity::Error, rule, place: self.place.clone(), message });
    }

    fn expect(&mut self, holds: bool, rule: &'static str, message: impl FnOnce() -> String) {
        if !holds {
            self.add(rule, message());
        }
    }

    fn model(&mut self, i: &Interface, p: &Program) {
        let version = self.spec_version;
        self.expect((1..=10).contains(&version), "spec-version", || {
            format!("specification version {version}, 1 to 10 are known")
        });
        self.expect(!i.updatable, "updatable", || "a program cannot be updatable".into());
        for (name, f) in &p.functions {
            match Opset::from_wire(&f.opset) {
                None => self.add("opset", format!("`{name}` uses the unknown opset `{}`", f.opset)),
                Some(o) => self.expect(o.spec_version() == version, "opset", || {
                    format!(
                        "`{name}` uses {}, which goes with specification version {}, this is {version}",
                        f.opset,
                        o.spec_version()
                    )
                }),
            }
        }
        if i.multi_function {
            self.multi_function(i);
        }
        let described: BTreeSet<&str> =
            i.functions.iter().map(|f| f.name.as_str()).filter(|n| !n.is_empty()).collect();
        for name in p.functions.keys().filter(|n| !described.contains(n.as_str())) {
            self.add("function", format!("function `{name}` of the program is not described"));
        }
        for name in described.iter().filter(|n| !p.functions.contains_key(**n)) {
            self.add(
                "function",
                format!("function `{name}` is described, the program has none of that name"),
            );
        }
    }

    fn multi_function(&mut self, i: &Interface) {
        let version = self.spec_version;
        self.expect(version >= 9, "multi-function", || {
            format!("several functions want specification version 9, this is {version}")
        });
        self.expect(i.function("").is_none(), "multi-function", || {
            "features are described for the model as a whole, beside its functions".into()
        });
        self.expect(i.training_inputs.is_empty(), "multi-function", || {
            "training inputs are described beside the functions".into()
        });
        let default = &i.default_function;
        self.expect(!default.is_empty() && i.function(default).is_some(), "default-function", || {
            format!("the default function `{default}` is not described")
        });
        let names: BTreeSet<&str> = i.functions.iter().map(|f| f.name.as_str()).collect();
        self.expect(names.len() == i.functions.len(), "multi-function", || {
            "two functions are described under one name".into()
        });
    }

    fn function(&mut self, f: &FunctionInterface) {
        let version = self.spec_version;
        self.expect(!f.outputs.is_empty(), "outputs", || "there is no output".into());
        self.expect(!f.inputs.is_empty() || version >= 9, "inputs", || {
            format!("a function without inputs wants specification version 9, this is {version}")
        });
        self.expect(f.inputs.is_empty() || f.inputs.iter().any(|i| !i.optional), "optional", || {
            "every input is optional, one must not be".into()
        });
        let mut names = BTreeSet::new();
        for feature in f.inputs.iter().chain(&f.states) {
            self.expect(names.insert(&feature.name), "name", || {
                format!("`{}` is described twice", feature.name)
            });
        }
        let mut names = BTreeSet::new();
        for feature in &f.outputs {
            self.expect(names.insert(&feature.name), "name", || {
                format!("output `{}` is described twice", feature.name)
            });
        }
        for feature in &f.inputs {
            self.input(feature);
        }
        for feature in &f.outputs {
            self.output(feature);
        }
        for feature in &f.states {
            self.state(feature);
        }
        for name in [&f.predicted_feature, &f.predicted_probabilities] {
            let known = name.is_empty() || f.outputs.iter().any(|o| o.name == *name);
            self.expect(known, "predicted", || format!("`{name}` is to be predicted, and is no output"));
        }
    }

    fn input(&mut self, f: &Feature) {
        self.feature(f);
        match &f.ty {
            FeatureType::Array(a) => {
                self.expect(!a.shape.is_empty() || a.sizes != Sizes::Fixed, "shape", || {
                    format!("input `{}` has no shape", f.name)
                });
                self.sizes(f, a);
                self.default(f, a);
            }
            FeatureType::State(_) => self.add("state", format!("state `{}` is listed as an input", f.name)),
            _ => {}
        }
    }

    fn output(&mut self, f: &Feature) {
        self.feature(f);
        self.expect(!f.optional, "optional", || format!("output `{}` is optional", f.name));
        if let FeatureType::State(_) = f.ty {
            self.add("state", format!("state `{}` is listed as an output", f.name));
        }
    }

    fn state(&mut self, f: &Feature) {
        self.feature(f);
        let version = self.spec_version;
        self.expect(version >= 9, "state", || {
            format!("state `{}` wants specification version 9, this is {version}", f.name)
        });
        self.expect(!f.optional, "optional", || format!("state `{}` is optional", f.name));
        let FeatureType::State(Some(a)) = &f.ty else {
            return self.add("state", format!("`{}` is listed as a state and is {}", f.name, f.ty));
        };
        self.expect(!a.shape.is_empty(), "shape", || format!("state `{}` has no shape", f.name));
        self.expect(a.sizes == Sizes::Fixed, "shape", || format!("state `{}` has a flexible shape", f.name));
        self.expect(a.default.is_none(), "default-value", || {
            format!("state `{}` has a default value", f.name)
        });
        self.expect(matches!(a.dtype, Some(DType::F16 | DType::I8)), "dtype", || {
            format!("state `{}` is {a}, fp16 is expected", f.name)
        });
    }

    fn feature(&mut self, f: &Feature) {
        self.expect(!f.name.is_empty(), "name", || format!("a feature of type {} has no name", f.ty));
        self.expect(f.ty != FeatureType::Unset, "type", || format!("`{}` has no type", f.name));
        match &f.ty {
            FeatureType::Array(a) | FeatureType::State(Some(a)) => self.array(f, a),
            FeatureType::Image(i) => self.image(f, i),
            _ => {}
        }
    }

    fn array(&mut self, f: &Feature, a: &Array) {
        let since = match a.dtype {
            Some(DType::F32 | DType::F64 | DType::I32) => 1,
            Some(DType::F16) => 7,
            Some(DType::I8) => 10,
            Some(other) => {
                return self.add("dtype", format!("`{}` is {other}, which no interface can have", f.name));
            }
            None => return self.add("dtype", format!("`{}` has no element type", f.name)),
        };
        // A state of int8 is a matter of its own rule.
        let (version, state) = (self.spec_version, matches!(f.ty, FeatureType::State(_)));
        self.expect(version >= since || state, "dtype", || {
            format!("`{}` is {a}, which wants specification version {since}, this is {version}", f.name)
        });
        self.expect(a.shape.iter().all(|n| *n >= 0), "shape", || format!("`{}` is {a}", f.name));
    }

    fn sizes(&mut self, f: &Feature, a: &Array) {
        match &a.sizes {
            Sizes::Fixed => {}
            Sizes::OneOf(shapes) => {
                let sound = !shapes.is_empty() && shapes.iter().all(|s| !s.is_empty());
                self.expect(sound, "shape", || format!("`{}` lists an empty shape, or none", f.name));
                self.expect(a.shape.is_empty() || shapes.contains(&a.shape), "shape", || {
                    format!("`{}`: the default {} is not among its shapes", f.name, shape_text(&a.shape))
                });
            }
            Sizes::Range(ranges) => {
                let crossed = ranges.iter().find(|r| r.upper > 0 && r.lower > r.upper.unsigned_abs());
                self.expect(crossed.is_none(), "shape", || {
                    format!("`{}`: a range ends before it begins", f.name)
                });
                let inside = |(n, r): (&i64, &super::SizeRange)| {
                    u64::try_from(*n).is_ok_and(|n| n >= r.lower) && (r.upper < 0 || *n <= r.upper)
                };
                let fits = a.shape.len() == ranges.len() && a.shape.iter().zip(ranges).all(inside);
                self.expect(a.shape.is_empty() || fits, "shape", || {
                    format!(
                        "`{}`: the default {} is outside {}",
                        f.name,
                        shape_text(&a.shape),
                        shape_text(ranges)
                    )
                });
            }
        }
    }

    fn default(&mut self, f: &Feature, a: &Array) {
        let Some(default) = a.default else { return };
        self.expect(f.optional, "default-value", || {
            format!("`{}` has a default value and is not optional", f.name)
        });
        let matching = matches!(
            (default, a.dtype),
            (DefaultValue::Int(_), Some(DType::I32 | DType::I8))
                | (DefaultValue::Float(_), Some(DType::F16 | DType::F32))
                | (DefaultValue::Double(_), Some(DType::F64))
        );
        self.expect(matching, "default-value", || {
            format!("`{}` is {a}, its default value is {default:?}", f.name)
        });
    }

    fn image(&mut self, f: &Feature, i: &Image) {
        self.expect(i.width > 0 && i.height > 0, "image", || {
            format!("`{}` is {i}, a size is expected", f.name)
        });
        self.expect(i.color != ColorSpace::Unset, "image", || format!("`{}` has no colour space", f.name));
        let version = self.spec_version;
        self.expect(i.color != ColorSpace::GrayFloat16 || version >= 7, "image", || {
            format!("`{}` is {i}, which wants specification version 7, this is {version}", f.name)
        });
    }

    fn agreement(&mut self, f: &FunctionInterface, function: &Function) {
        for id in &function.inputs {
            let v = function.value(*id);
            let (listed, what) = match v.ty {
                Type::State(_) => (&f.states, "state"),
                _ => (&f.inputs, "input"),
            };
            match listed.iter().find(|d| d.name == v.name) {
                None => self.add("described", format!("{what} `{}` of the program is not described", v.name)),
                Some(d) => self.same(what, d, &v.ty),
            }
        }
        let inputs: BTreeSet<&str> = function.inputs.iter().map(|id| function.name(*id)).collect();
        for d in f.inputs.iter().chain(&f.states).filter(|d| !inputs.contains(d.name.as_str())) {
            self.add("described", format!("`{}` is described, the program takes no such input", d.name));
        }
        for id in &function.body.outputs {
            let v = function.value(*id);
            match f.outputs.iter().find(|d| d.name == v.name) {
                None => self.add("described", format!("output `{}` of the program is not described", v.name)),
                Some(d) => self.same("output", d, &v.ty),
            }
        }
        let outputs: BTreeSet<&str> = function.body.outputs.iter().map(|id| function.name(*id)).collect();
        for d in f.outputs.iter().filter(|d| !outputs.contains(d.name.as_str())) {
            self.add(
                "described",
                format!("output `{}` is described, the program has none of that name", d.name),
            );
        }
    }

    fn same(&mut self, what: &str, d: &Feature, ty: &Type) {
        let same = match (&d.ty, ty) {
            (FeatureType::Array(a), Type::Tensor(t)) => agrees(a, t),
            (FeatureType::State(Some(a)), Type::State(s)) => s.as_tensor().is_some_and(|t| agrees(a, t)),
            (FeatureType::Image(i), Type::Tensor(t)) => pictures(i, t),
            (FeatureType::String, Type::Tensor(t)) => t.dtype == DType::String,
            (FeatureType::Int64, Type::Tensor(t)) => t.dtype.is_int(),
            (FeatureType::Double, Type::Tensor(t)) => t.dtype.is_float(),
            (FeatureType::Dictionary(_), Type::Dict(..)) => true,
            (FeatureType::Sequence { .. }, Type::List { .. } | Type::Tensor(_)) => true,
            _ => false,
        };
        self.expect(same, "described", || {
            format!("{what} `{}` is described as {}, in the program it is {ty}", d.name, d.ty)
        });
    }
}

fn agrees(a: &Array, t: &TensorType) -> bool {
    let size = |(i, dim): (usize, &Dim)| match (dim, &a.sizes) {
        (Dim::Fixed(n), Sizes::Range(r)) => {
            r.get(i).is_some_and(|r| u64::try_from(r.upper) == Ok(r.lower) && r.lower == *n as u64)
        }
        (Dim::Fixed(n), Sizes::OneOf(s)) => s.iter().all(|s| s.get(i) == i64::try_from(*n).ok().as_ref()),
        (Dim::Fixed(n), Sizes::Fixed) => a.shape.get(i) == i64::try_from(*n).ok().as_ref(),
        (Dim::Unknown { .. }, _) => true,
    };
    let rank = match &a.sizes {
        Sizes::Fixed => a.shape.len(),
        Sizes::OneOf(shapes) => shapes.first().map_or(0, Vec::len),
        Sizes::Range(ranges) => ranges.len(),
    };
    let unsaid = a.sizes == Sizes::Fixed && a.shape.is_empty();
    a.dtype == Some(t.dtype) && (unsaid || (rank == t.rank() && t.dims.iter().enumerate().all(size)))
}

fn pictures(i: &Image, t: &TensorType) -> bool {
    let channels = match i.color {
        ColorSpace::Gray | ColorSpace::GrayFloat16 => 1,
        _ => 3,
    };
    let size = |n: i64| usize::try_from(n).map_or(Dim::ANY, Dim::Fixed);
    match t.dims.as_slice() {
        [_, c, h, w] => {
            c.agrees(Dim::Fixed(channels))
                && (i.sizes != Sizes::Fixed || (h.agrees(size(i.height)) && w.agrees(size(i.width))))
        }
        _ => false,
    }
}
