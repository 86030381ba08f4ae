//! Packages read, written and refused.

mod damage;
mod interface;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};
use silane::{
    graph::check,
    mil::{Arg, Block, Const, DType, Data, Dim, Literal, Program, Type, Weight, print},
    package::{Opened, Package, Save, blob, interface::problems, op_counts, open, open_program, save},
};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/packages").join(name)
}

/// Name, specification version, ops, weights referred to.
const PROGRAMS: [(&str, i32, usize, usize); 15] = [
    ("basic_pitch", 6, 471, 21),
    ("conv_ios16", 7, 30, 3),
    ("flexible_enum_ios18", 9, 14, 1),
    ("flexible_range_ios18", 9, 14, 1),
    ("fp32_ios15", 6, 9, 1),
    ("image_input_ios16", 7, 18, 1),
    ("int4_per_block_ios18", 9, 7, 5),
    ("int8_affine_ios16", 7, 3, 4),
    ("joint_sparse_ios18", 9, 14, 7),
    ("lut4_grouped_ios18", 9, 7, 3),
    ("lut6_ios18", 9, 11, 4),
    ("milc_int8_enumerated", 10, 264, 36),
    ("multifunction_state_ios18", 9, 26, 4),
    ("silero_vad_palette4", 7, 137, 20),
    ("state_ios18", 9, 24, 1),
];

#[test]
fn programs_of_several_producers_open() {
    let mut seen = Vec::new();
    for (name, ..) in PROGRAMS {
        let package = program(name);
        let weights = weights(&package.program);
        for w in &weights {
            w.bytes().unwrap();
        }
        let ops = op_counts(&package.program).values().sum();
        seen.push((name, package.spec_version, ops, weights.len()));
        let broken = problems(&package.interface, &package.program, package.spec_version);
        assert_eq!(broken, [], "{name}");
    }
    assert_eq!(seen, PROGRAMS);
}

#[test]
fn a_rewritten_package_says_the_same() {
    let dir = tempfile::tempdir().unwrap();
    for (name, ..) in PROGRAMS {
        let package = program(name);
        if name == "milc_int8_enumerated" {
            let refused = package.rewritable().unwrap_err().to_string();
            assert!(refused.contains("field 16 of `Metadata` is not known"), "{refused}");
            continue;
        }
        package.rewritable().unwrap();
        let path = dir.path().join(format!("{name}.mlpackage"));
        let again = path.with_extension("again.mlpackage");
        for path in [&path, &again] {
            let checked = check(package.program.clone()).unwrap();
            save(path, &checked, &package.interface, Save { from: Some(&package), ..Save::default() })
                .unwrap();
        }
        assert_eq!(files(&path), files(&again), "{name}: the same input gives the same bytes");
        let new = open_program(&path).unwrap();
        new.rewritable().unwrap();
        assert_eq!(new.spec_version, package.spec_version);
        assert_eq!(new.interface, package.interface, "{name}");
        for (a, b) in weights(&package.program).iter().zip(weights(&new.program)) {
            assert_eq!(*a.bytes().unwrap(), *b.bytes().unwrap(), "{name}: {}", a.key);
        }
        assert_eq!(without_places(new.program), without_places(package.program), "{name}");
    }
}

#[test]
fn a_weight_file_copied_record_by_record_is_the_same_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut copied = 0;
    // One writer left in the heads what it had in memory, the other stores equal weights twice.
    for (name, ..) in PROGRAMS.iter().filter(|p| !["basic_pitch", "milc_int8_enumerated"].contains(&p.0)) {
        let path = fixture(&format!("{name}.mlpackage/Data/com.apple.CoreML/weights/weight.bin"));
        let reader = blob::Reader::open(&path).unwrap();
        let copy = dir.path().join(name);
        let mut writer = blob::Writer::create(&copy).unwrap();
        for record in reader.records() {
            let record = record.unwrap();
            let (reader, dtype) = (reader.clone(), record.dtype().unwrap());
            let count = usize::try_from(record.len * 8 - record.padding).unwrap() / dtype.bits().unwrap();
            let weight = Weight::new(format!("{copied}"), dtype, [count], move || Ok(reader.bytes(&record)));
            assert_eq!(writer.add(&weight).unwrap(), record.offset, "{name}");
            copied += 1;
        }
        writer.finish().unwrap();
        assert_eq!(fs::read(&copy).unwrap(), fs::read(&path).unwrap(), "{name}");
    }
    assert!(copied > 50, "{copied}");
}

/// Digests of payloads, written down when the packages were made.
#[test]
fn payloads_are_those_that_were_written() {
    for (name, offset, dtype, digest) in [
        ("lut6_ios18", 64, DType::U6, "69256cb6994e9d80db43968025f396ee01960517041a091e155b768261a01f0d"),
        ("lut6_ios18", 384, DType::U3, "7ca9284c5bf665c128fcd0a46e5ab6cc1a47c61c4f2a98eb65d0480c74b700be"),
        ("lut6_ios18", 512, DType::U1, "bdea3bf1fb789944d52ce9a67c774be9784397dea263ee0f482ae7d11a04ede1"),
        (
            "int4_per_block_ios18",
            64,
            DType::I4,
            "c1fd081971df229cf1c2ff89418651cfd3f2e7262768f0f677669cf1c927a8dc",
        ),
        (
            "int4_per_block_ios18",
            448,
            DType::U4,
            "b5d214050027309741b241b65408306847951d0e70c61f12be22c5c3e2350782",
        ),
        ("conv_ios16", 576, DType::F16, "b06bfd0e60b49124aceab6f16c6516e9df8c6cd8d569aa30d9c092f500c0757e"),
    ] {
        let package = program(name);
        let reader = package.weight_files[0].reader().unwrap();
        let record = reader.record(offset).unwrap();
        assert_eq!(record.dtype(), Some(dtype));
        let found: String =
            Sha256::digest(&*reader.bytes(&record)).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(found, digest, "{name} {offset}");
    }
}

#[test]
fn equal_weights_are_stored_once() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = blob::Writer::create(&dir.path().join("w")).unwrap();
    let weight = |key: &str, dtype, bytes: Vec<u8>| {
        Weight::new(key, dtype, [bytes.len()], move || Ok(bytes.clone().into()))
    };
    let first = writer.add(&weight("a", DType::U8, vec![1; 70])).unwrap();
    assert_eq!(first, 64);
    assert_eq!(writer.add(&weight("a", DType::U8, vec![1; 70])).unwrap(), first, "the same key");
    assert_eq!(writer.add(&weight("b", DType::U8, vec![1; 70])).unwrap(), first, "the same bytes");
    assert_eq!(writer.add(&weight("c", DType::I8, vec![1; 70])).unwrap(), 256, "another type");
    assert_eq!(writer.finish().unwrap().0, 256 + 64 + 70);
    let mut writer = blob::Writer::create(&dir.path().join("x")).unwrap();
    let refused = writer.add(&weight("mask", DType::Bool, vec![1; 70])).unwrap_err();
    assert_eq!(refused.message(), "weight `mask`: bool has no place in a weight file");
}

#[test]
fn models_of_other_kinds_are_named() {
    let foreign = |name: &str| match open(&fixture(name)).unwrap() {
        Opened::Other(foreign) => foreign,
        Opened::Program(_) => panic!("{name} is a program"),
    };
    let network = foreign("identity.mlmodel");
    assert_eq!(network.to_string(), "a neural network of 1 layer (`neuralNetwork`)");
    assert_eq!(network.interface.functions[0].inputs.len(), 1);
    let pipeline = foreign("sentiment_pipeline.mlmodel");
    assert_eq!(pipeline.to_string(), "a pipeline of 2 models (pipeline, glmClassifier)");
    assert_eq!(
        pipeline.models[0].1.to_string(),
        "a pipeline of 2 models (dictVectorizer, featureVectorizer)"
    );
    let compiled = foreign("silero_vad_compiled.mlmodelc");
    assert_eq!(compiled.to_string(), "a compiled bundle (`.mlmodelc`)");
    let package = program("silero_vad_no_weights");
    assert_eq!(compiled.ops, op_counts(&package.program), "the text and the package it came from");
    let refused = open_program(&fixture("identity.mlmodel")).unwrap_err();
    assert!(refused.message().ends_with("(`neuralNetwork`), not an ML Program"), "{refused}");
}

#[test]
fn a_package_without_its_weights_still_opens() {
    let package = program("silero_vad_no_weights");
    assert_eq!(op_counts(&package.program)["lstm"], 1);
    let refused = weights(&package.program)[0].bytes().err().unwrap();
    assert!(refused.message().ends_with("weights/weight.bin is missing"), "{refused}");
    let dir = tempfile::tempdir().unwrap();
    let path = copy_of("conv_ios16", dir.path());
    fs::write(weight_bin(&path), "version https://git-lfs.github.com/spec/v1\n").unwrap();
    let refused = weights(&open_program(&path).unwrap().program)[0].bytes().err().unwrap();
    assert!(refused.message().contains("is a Git LFS pointer, not the weights"), "{refused}");
}

#[test]
fn what_is_no_package_is_said_to_be_what_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("empty")).unwrap();
    fs::create_dir_all(at("other/things")).unwrap();
    let mut cases: Vec<(&str, &[u8], &str)> = vec![
        ("nothing.mlmodel", b"", "the file is empty"),
        ("pointer.mlmodel", b"version https://git-lfs.github.com/spec/v1\noid", "a Git LFS pointer"),
        ("zipped.mlpackage", b"PK\x03\x04\x14\x00", "a zip archive"),
        ("notes.txt", b"a list of things\n", "a text file, not a model"),
        ("odd.mlmodel", b"\x08\x09\xff\xff\xff", "not a Core ML model"),
        ("kindless.mlmodel", b"\x08\x09", "no model of a known kind"),
    ];
    for (name, bytes, _) in &cases {
        fs::write(at(name), bytes).unwrap();
    }
    cases.push(("empty", b"", "is an empty directory"));
    cases.push(("other", b"", "has no `Manifest.json`"));
    cases.push(("missing", b"", "No such file"));
    for (name, _, says) in cases {
        let refused = open(&at(name)).err().unwrap();
        assert!(refused.message().contains(says), "{name}: {refused}");
    }
}

#[test]
fn manifests_are_checked_and_kept() {
    let dir = tempfile::tempdir().unwrap();
    let path = copy_of("conv_ios16", dir.path());
    let manifest = path.join("Manifest.json");
    let text = fs::read_to_string(&manifest).unwrap();
    for (from, to, says) in [
        ("rootModelIdentifier", "rootModel", "`rootModelIdentifier` is missing"),
        ("itemInfoEntries", "items", "`itemInfoEntries` is missing"),
        ("\"path\": \"com.apple.CoreML/model.mlmodel\"", "\"path\": 7", "`path` is 7, a string is expected"),
        ("com.apple.CoreML/model.mlmodel", "../../model.mlmodel", "leads out of the package"),
        ("com.apple.CoreML/model.mlmodel", "com.apple.CoreML/m.mlmodel", "the model file is missing"),
        ("{", "", "not valid"),
    ] {
        fs::write(&manifest, text.replacen(from, to, 1)).unwrap();
        let refused = open(&path).err().unwrap();
        assert!(refused.message().contains(says), "{to}: {refused}");
    }
    let more = text.replacen(
        "\"itemInfoEntries\": {",
        "\"note\": [1],\n\"itemInfoEntries\": {\"F\": {\"author\": \"me\", \"description\": \"\", \"name\": \"extra\", \"path\": \"me/extra.json\", \"flag\": true},",
        1,
    );
    fs::write(&manifest, more).unwrap();
    fs::create_dir(path.join("Data/me")).unwrap();
    fs::write(path.join("Data/me/extra.json"), "{}").unwrap();
    let package = open_program(&path).unwrap();
    let new = dir.path().join("new.mlpackage");
    let checked = check(package.program.clone()).unwrap();
    save(&new, &checked, &package.interface, Save { from: Some(&package), ..Save::default() }).unwrap();
    let kept = open_program(&new).unwrap().manifest.unwrap();
    assert_eq!(kept.items.len(), 3);
    assert_eq!(kept.items["F"], package.manifest.unwrap().items["F"]);
    assert_eq!(kept.other["note"], serde_json::json!([1]));
    assert_eq!(fs::read_to_string(new.join("Data/me/extra.json")).unwrap(), "{}");
    let text = fs::read_to_string(new.join("Manifest.json")).unwrap();
    assert!(
        text.starts_with("{\n    \"fileFormatVersion\": \"1.0.0\",\n    \"itemInfoEntries\": {"),
        "{text}"
    );
    assert!(text.ends_with("}\n"));
    for id in kept.items.keys().filter(|id| *id != "F") {
        let uuid = uuid::Uuid::parse_str(id).unwrap();
        assert_eq!((uuid.get_version_num(), uuid.to_string()), (4, id.clone()));
    }
}

#[test]
fn targets_are_refused_before_anything_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let source = copy_of("conv_ios16", dir.path());
    let link = dir.path().join("link.mlpackage");
    std::os::unix::fs::symlink(&source, &link).unwrap();
    let before = files(&source);
    let package = open_program(&link).unwrap();
    let write = |path: &Path, force| {
        let checked = check(package.program.clone()).unwrap();
        save(path, &checked, &package.interface, Save { force, from: Some(&package), ..Save::default() })
    };
    for (name, force, says) in [
        ("out.mlmodel", false, "written as packages"),
        ("out", true, "written as packages"),
        ("conv_ios16.mlpackage", true, "is the package that is being read"),
        ("link.mlpackage", true, "is the package that is being read"),
        ("conv_ios16.mlpackage/Data/in.mlpackage", true, "is the package that is being read"),
        ("none/out.mlpackage", false, "No such file"),
    ] {
        let refused = write(&dir.path().join(name), force).unwrap_err();
        assert!(refused.message().contains(says), "{name}: {refused}");
    }
    let out = dir.path().join("out.mlpackage");
    fs::create_dir(&out).unwrap();
    fs::write(out.join("old"), "").unwrap();
    assert!(write(&out, false).unwrap_err().message().ends_with("exists already"));
    let saved = write(&out, true).unwrap();
    assert_eq!(
        saved.model_bytes,
        fs::metadata(out.join("Data/com.apple.CoreML/model.mlmodel")).unwrap().len()
    );
    assert_eq!(saved.weight_bytes, fs::metadata(weight_bin(&out)).unwrap().len());
    assert!(!out.join("old").exists());
    assert_eq!(files(&source), before);
    assert_eq!(entries(dir.path()), ["conv_ios16.mlpackage", "link.mlpackage", "out.mlpackage"]);
}

#[test]
fn a_failed_write_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let package = program("silero_vad_no_weights");
    let checked = check(package.program.clone()).unwrap();
    let path = dir.path().join("out.mlpackage");
    let options = Save { from: Some(&package), ..Save::default() };
    let refused = save(&path, &checked, &package.interface, options).unwrap_err();
    assert!(refused.message().contains("is missing"), "{refused}");
    let mut interface = package.interface.clone();
    interface.functions[0].outputs.clear();
    let refused = save(&path, &checked, &interface, options).unwrap_err();
    assert!(refused.message().contains("there is no output"), "{refused}");
    assert_eq!(entries(dir.path()), [""; 0]);
}

/// A program without weights has no weights item, which would name a directory that git does not keep.
#[test]
fn a_program_without_weights_has_no_weight_file() {
    let dir = tempfile::tempdir().unwrap();
    let Package { mut program, interface, .. } = program("fp32_ios15");
    program.functions.get_mut("main").unwrap().body.walk_mut(&mut |op| {
        for c in op.attrs.values_mut().filter(|c| matches!(c.data, Data::Weight(_))) {
            c.data = Data::Literal(Literal::Floats(c.numbers().unwrap().into_floats()));
        }
    });
    let path = dir.path().join("out.mlpackage");
    let saved = save(&path, &check(program).unwrap(), &interface, Save::default()).unwrap();
    assert_eq!((saved.weight_bytes, saved.spec_version), (0, 6));
    let package = open_program(&path).unwrap();
    assert_eq!(package.manifest.unwrap().items.len(), 1);
    assert_eq!(entries(&path.join("Data/com.apple.CoreML")), ["model.mlmodel"]);
}

#[test]
fn packages_with_other_layouts_and_odd_paths_open() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tempfile::tempdir().unwrap();
    let source = copy_of("conv_ios16", dir.path());
    let odd = dir.path().join(std::ffi::OsStr::from_bytes(b"caf\xe9.mlpackage"));
    fs::create_dir_all(odd.join("Data/weights")).unwrap();
    fs::copy(source.join("Data/com.apple.CoreML/model.mlmodel"), odd.join("Data/model.mlmodel")).unwrap();
    fs::copy(weight_bin(&source), odd.join("Data/weights/weight.bin")).unwrap();
    let manifest = fs::read_to_string(source.join("Manifest.json")).unwrap();
    fs::write(odd.join("Manifest.json"), manifest.replace("com.apple.CoreML/", "")).unwrap();
    for path in [odd.clone(), odd.join("Data/model.mlmodel")] {
        let package = open_program(&path).unwrap();
        assert_eq!(without_places(package.program.clone()), without_places(program("conv_ios16").program));
        weights(&package.program).iter().for_each(|w| drop(w.bytes().unwrap()));
    }
}

/// One of the three mentions of a constant is changed: its name as an op, its value, its use.
#[test]
fn names_must_be_defined_before_they_are_used() {
    let dir = tempfile::tempdir().unwrap();
    let path = copy_of("int4_per_block_ios18", dir.path());
    let model = path.join("Data/com.apple.CoreML/model.mlmodel");
    let (whole, name) = (fs::read(&model).unwrap(), b"asym_bias_0");
    let mentions = whole.windows(name.len()).enumerate().filter(|(_, w)| *w == name).map(|(at, _)| at);
    let mut refused = Vec::new();
    for at in mentions {
        let mut bytes = whole.clone();
        bytes[at..at + name.len()].copy_from_slice(b"asym_bias_9");
        fs::write(&model, bytes).unwrap();
        refused.extend(open(&path).err().map(|e| e.message().rsplit(": ").next().unwrap().to_string()));
    }
    refused.sort();
    let missing = |n| format!("`asym_bias_{n}` is used before anything defines it");
    assert_eq!(refused, [missing(0), missing(9)]);
}

#[test]
fn programs_print_as_mil_text() {
    let order = |_: &str, param: &str| usize::from(param != "x");
    let text = print::text(&program("int4_per_block_ios18").program, &order);
    expect_test::expect![[r#"
        program(1.0)
        [buildInfo = dict<string, string>({{string("coremltools-version"), string("9.0")}, {string("coremltools-component-milinternal"), string("")}})]
        {
            func main<CoreML8>(tensor<fp16, [1, 64]> x) {
                tensor<fp16, [6, 64]> w = constexpr_blockwise_shift_scale(data = tensor<int4, [6, 64]>(weight("@model_path/weights/weight.bin:64")), scale = tensor<fp16, [6, 2]>(weight("@model_path/weights/weight.bin:320")))[name = string("w")];
                tensor<fp16, [6]> sym_bias_0 = const()[name = string("sym_bias_0"), val = tensor<fp16, [6]>([0, 0, 0, 0, 0, 0])];
                tensor<fp16, [1, 6]> sym = linear(x = x, bias = sym_bias_0, weight = w)[name = string("sym")];
                tensor<fp16, [6, 64]> w2 = constexpr_blockwise_shift_scale(data = tensor<uint4, [6, 64]>(weight("@model_path/weights/weight.bin:448")), offset = tensor<uint4, [6, 2]>(weight("@model_path/weights/weight.bin:832")), scale = tensor<fp16, [6, 2]>(weight("@model_path/weights/weight.bin:704")))[name = string("w2")];
                tensor<fp16, [6]> asym_bias_0 = const()[name = string("asym_bias_0"), val = tensor<fp16, [6]>([0, 0, 0, 0, 0, 0])];
                tensor<fp16, [1, 6]> asym = linear(x = x, bias = asym_bias_0, weight = w2)[name = string("asym")];
                tensor<fp16, [1, 6]> y = add(x = sym, y = asym)[name = string("y")];
            } -> (y);
        }
    "#]].assert_eq(&text);
}

#[test]
fn sizes_that_are_not_known_survive() {
    let package = program("flexible_range_ios18");
    let f = &package.program.functions["main"];
    let Type::Tensor(t) = f.ty(f.inputs[0]) else { panic!() };
    assert_eq!(t.dims, [Dim::Fixed(1), Dim::ANY, Dim::Fixed(8)]);
}

fn program(name: &str) -> Package {
    open_program(&fixture(&format!("{name}.mlpackage"))).unwrap()
}

fn weight_bin(package: &Path) -> PathBuf {
    package.join("Data/com.apple.CoreML/weights/weight.bin")
}

/// Every weight in the order of the program.
fn weights(program: &Program) -> Vec<Weight> {
    fn constants(block: &Block, found: &mut Vec<Weight>) {
        block.walk(&mut |op| {
            let direct = op.args().filter_map(|a| match a {
                Arg::Const(c) => Some(c),
                Arg::Value(_) => None,
            });
            for c in direct.chain(op.attrs.values()) {
                if let Data::Weight(w) = &c.data {
                    found.push(w.clone());
                }
            }
        });
    }
    let mut found = Vec::new();
    program.functions.values().for_each(|f| constants(&f.body, &mut found));
    found
}

/// The program with weights that do not say where they are stored.
fn without_places(mut program: Program) -> Program {
    fn strip(c: &mut Const) {
        if let Data::Weight(w) = &mut c.data {
            w.key.clear();
        }
    }
    for f in program.functions.values_mut() {
        f.body.walk_mut(&mut |op| {
            op.attrs.values_mut().for_each(strip);
            for arg in op.params.values_mut().flatten() {
                if let Arg::Const(c) = arg {
                    strip(c);
                }
            }
        });
    }
    program
}

fn copy_of(name: &str, dir: &Path) -> PathBuf {
    let path = dir.join(format!("{name}.mlpackage"));
    for (file, bytes) in files(&fixture(&format!("{name}.mlpackage"))) {
        fs::create_dir_all(path.join(&file).parent().unwrap()).unwrap();
        fs::write(path.join(file), bytes).unwrap();
    }
    path
}

fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Every file below a directory.
fn files(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    fn walk(root: &Path, dir: &Path, found: &mut BTreeMap<PathBuf, Vec<u8>>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(root, &path, found);
            } else {
                found.insert(path.strip_prefix(root).unwrap().into(), fs::read(&path).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(dir, dir, &mut found);
    found
}
