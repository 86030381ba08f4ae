//! What packages say about themselves, and the rules that it must keep.

use silane::{
    mil::{DType, Function},
    package::{
        Interface, Package,
        interface::{
            Array, ColorSpace, DefaultValue, Feature, FeatureType, FunctionInterface, Sizes, problems,
        },
    },
};

use super::program;

#[test]
fn interfaces_are_read_in_full() {
    let seen: Vec<String> =
        ["flexible_enum_ios18", "flexible_range_ios18", "image_input_ios16", "multifunction_state_ios18"]
            .into_iter()
            .flat_map(|name| program(name).interface.functions)
            .flat_map(|f| {
                let features: Vec<String> =
                    f.inputs.iter().chain(&f.states).chain(&f.outputs).map(ToString::to_string).collect();
                features.into_iter().map(move |text| format!("{}: {text}", f.name))
            })
            .collect();
    expect_test::expect![[r#"
        main: x: fp16 [1, 16, 8], one of [1, 16, 8] [1, 1, 8] [1, 64, 8]
        main: y: fp16
        main: x: fp16 [1, 1..128, 8], default [1, 16, 8]
        main: y: fp16
        main: image: image 16×16 RGB
        main: y: fp32 [1, 2]
        prefill: x: fp16 [1, 4, 16]
        prefill: acc: state fp16 [1, 16]
        prefill: y: fp16 [1, 4, 16]
        decode: x: fp16 [1, 1, 16]
        decode: acc: state fp16 [1, 16]
        decode: y: fp16 [1, 1, 16]"#]]
    .assert_eq(&seen.join("\n"));
}

#[test]
fn an_interface_is_derived_from_fixed_sizes() {
    for name in ["conv_ios16", "state_ios18", "multifunction_state_ios18"] {
        let package = program(name);
        let derived = Interface::of(&package.program).unwrap();
        assert_eq!(derived.multi_function, package.interface.multi_function, "{name}");
        assert_eq!(derived.default_function, package.interface.default_function, "{name}");
        for f in &package.interface.functions {
            let own = derived.function(&f.name).unwrap();
            assert_eq!((&own.inputs, &own.states), (&f.inputs, &f.states), "{name}");
        }
        let broken = problems(&derived, &package.program, package.spec_version);
        assert_eq!(broken, [], "{name}");
    }
    let refused = Interface::of(&program("flexible_enum_ios18").program).unwrap_err();
    assert!(refused.message().contains("flexible size"), "{refused}");
}

/// One thing broken in a sound package, and the rule that finds it.
#[test]
fn interface_rules_find_what_is_broken() {
    type Break = fn(&mut Package);
    fn array(f: &mut Feature) -> &mut Array {
        match &mut f.ty {
            FeatureType::Array(a) | FeatureType::State(Some(a)) => a,
            other => panic!("{other}"),
        }
    }
    let table: [(&str, &str, Break); 30] = [
        ("conv_ios16", "spec-version", |p| p.spec_version = 11),
        ("conv_ios16", "opset", |p| p.spec_version = 8),
        ("conv_ios16", "opset", |p| main(p).1.opset = "CoreML99".into()),
        ("conv_ios16", "updatable", |p| p.interface.updatable = true),
        ("conv_ios16", "outputs", |p| main(p).0.outputs.clear()),
        ("conv_ios16", "inputs", |p| main(p).0.inputs.clear()),
        ("conv_ios16", "optional", |p| main(p).0.inputs.iter_mut().for_each(|f| f.optional = true)),
        ("conv_ios16", "optional", |p| main(p).0.outputs[0].optional = true),
        ("conv_ios16", "name", |p| main(p).0.inputs[0].name.clear()),
        ("conv_ios16", "name", |p| {
            let twice = main(p).0.outputs[0].clone();
            main(p).0.outputs.push(twice);
        }),
        ("conv_ios16", "type", |p| main(p).0.inputs[0].ty = FeatureType::Unset),
        ("conv_ios16", "dtype", |p| array(&mut main(p).0.inputs[0]).dtype = Some(DType::Bool)),
        ("conv_ios16", "dtype", |p| array(&mut main(p).0.inputs[0]).dtype = Some(DType::I8)),
        ("conv_ios16", "shape", |p| array(&mut main(p).0.inputs[0]).shape.clear()),
        ("conv_ios16", "shape", |p| array(&mut main(p).0.inputs[0]).shape[0] = -1),
        ("conv_ios16", "described", |p| array(&mut main(p).0.inputs[0]).shape[1] += 1),
        ("conv_ios16", "described", |p| main(p).0.outputs[0].name = "other".into()),
        ("conv_ios16", "default-value", |p| {
            array(&mut main(p).0.inputs[0]).default = Some(DefaultValue::Int(0));
        }),
        ("conv_ios16", "predicted", |p| main(p).0.predicted_feature = "label".into()),
        ("image_input_ios16", "image", |p| {
            let FeatureType::Image(image) = &mut main(p).0.inputs[0].ty else { panic!() };
            image.color = ColorSpace::Unset;
        }),
        ("image_input_ios16", "described", |p| {
            let FeatureType::Image(image) = &mut main(p).0.inputs[0].ty else { panic!() };
            image.width += 1;
        }),
        ("flexible_enum_ios18", "shape", |p| {
            let Sizes::OneOf(shapes) = &mut array(&mut main(p).0.inputs[0]).sizes else { panic!() };
            shapes.clear();
        }),
        ("flexible_range_ios18", "shape", |p| array(&mut main(p).0.inputs[0]).shape[1] = 999),
        ("state_ios18", "described", |p| main(p).0.states.clear()),
        ("state_ios18", "state", |p| {
            let state = main(p).0.states.remove(0);
            main(p).0.inputs.push(state);
        }),
        ("state_ios18", "dtype", |p| array(&mut main(p).0.states[0]).dtype = Some(DType::F32)),
        ("state_ios18", "shape", |p| array(&mut main(p).0.states[0]).sizes = Sizes::OneOf(vec![])),
        ("multifunction_state_ios18", "default-function", |p| {
            p.interface.default_function = "infer".into();
        }),
        ("multifunction_state_ios18", "function", |p| drop(p.interface.functions.remove(0))),
        ("multifunction_state_ios18", "multi-function", |p| {
            p.interface.functions.push(FunctionInterface::default());
        }),
    ];
    for (i, (name, rule, edit)) in table.into_iter().enumerate() {
        let mut package = program(name);
        edit(&mut package);
        let broken = problems(&package.interface, &package.program, package.spec_version);
        assert!(broken.iter().any(|p| p.rule == rule), "{i}: {name}: {rule}: {broken:?}");
    }
}

fn main(p: &mut Package) -> (&mut FunctionInterface, &mut Function) {
    (&mut p.interface.functions[0], p.program.functions.get_mut("main").unwrap())
}
