//! `silane inspect`: whatever is given, a clear answer.

use std::fs;

use expect_test::expect;

use super::Bench;

const POINTER: &str = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 90868376\n";

#[test]
fn programs_are_summarised() {
    let bench = Bench::with_packages(&[
        "flexible_range_ios18.mlpackage",
        "multifunction_state_ios18.mlpackage",
        "silero_vad_palette4.mlpackage",
    ]);
    expect![[r#"
        $ silane inspect flexible_range_ios18.mlpackage
        flexible_range_ios18.mlpackage: ML Program, CoreML8 (iOS 18, macOS 15), specification version 9
          com.github.apple.coremltools.conversion_date: 2026-11-29
          com.github.apple.coremltools.source: milinternal
          com.github.apple.coremltools.version: 9.0

        inputs
          x  fp16 [1, 1..128, 8], default [1, 16, 8]

        outputs
          y  fp16

        ops: 6
          cast    2
          gather  1
          linear  1
          mul     1
          shape   1

        weights: 64 B in 1 tensor
          fp16  1  64 B
        [exit 0]

        $ silane inspect multifunction_state_ios18.mlpackage
        multifunction_state_ios18.mlpackage: ML Program, CoreML8 (iOS 18, macOS 15), specification version 9

        function prefill

        inputs
          x  fp16 [1, 4, 16]

        outputs
          y  fp16 [1, 4, 16]

        states
          acc  state fp16 [1, 16]

        ops: 8
          add          2
          read_state   2
          expand_dims  1
          linear       1
          reduce_sum   1
          write_state  1

        function decode (default)

        inputs
          x  fp16 [1, 1, 16]

        outputs
          y  fp16 [1, 1, 16]

        states
          acc  state fp16 [1, 16]

        ops: 8
          add          2
          read_state   2
          expand_dims  1
          linear       1
          reduce_sum   1
          write_state  1

        weights: 544 B in 2 tensors
          fp16  2  544 B
        [exit 0]

        $ silane inspect silero_vad_palette4.mlpackage --weights
        name                                        type                stored as                                bits/weight  bytes
        stft_forward_basis_to_fp16_palettized       fp16 [258, 1, 256]  lut_to_dense: uint8 [33024] + fp16 [16]         4.00  33056
        encoder_layers_0_weight_to_fp16_palettized  fp16 [128, 129, 3]  lut_to_dense: uint8 [24768] + fp16 [16]         4.01  24800
        encoder_layers_0_bias_to_fp16               fp16 [128]          fp16 [128]                                     16.00    256
        encoder_layers_2_weight_to_fp16_palettized  fp16 [64, 128, 3]   lut_to_dense: uint8 [12288] + fp16 [16]         4.01  12320
        encoder_layers_2_bias_to_fp16               fp16 [64]           fp16 [64]                                      16.00    128
        encoder_layers_4_weight_to_fp16_palettized  fp16 [64, 64, 3]    lut_to_dense: uint8 [6144] + fp16 [16]          4.02   6176
        encoder_layers_4_bias_to_fp16               fp16 [64]           fp16 [64]                                      16.00    128
        encoder_layers_6_weight_to_fp16_palettized  fp16 [128, 64, 3]   lut_to_dense: uint8 [12288] + fp16 [16]         4.01  12320
        encoder_layers_6_bias_to_fp16               fp16 [128]          fp16 [128]                                     16.00    256
        concat_0                                    fp32 [512]          fp32 [512]                                     32.00   2048
        concat_1_palettized                         fp32 [512, 128]     lut_to_dense: uint8 [32768] + fp32 [16]         4.01  32832
        concat_2_palettized                         fp32 [512, 128]     lut_to_dense: uint8 [32768] + fp32 [16]         4.01  32832
        decoder_final_conv_weight_to_fp16           fp16 [1, 128, 1]    fp16 [1, 128, 1]                               16.00    256
        [exit 0]

        $ silane inspect flexible_range_ios18.mlpackage --text
        program(1.0)
        [buildInfo = dict<string, string>({{string("coremltools-version"), string("9.0")}, {string("coremltools-component-milinternal"), string("")}})]
        {
            func main<CoreML8>(tensor<fp16, [1, ?, 8]> x) {
                tensor<fp16, [4, 8]> lin_weight_0 = const()[name = string("lin_weight_0"), val = tensor<fp16, [4, 8]>(weight("@model_path/weights/weight.bin:64"))];
                tensor<fp16, [4]> lin_bias_0 = const()[name = string("lin_bias_0"), val = tensor<fp16, [4]>([0, 0, 0, 0])];
                tensor<fp16, [1, ?, 4]> lin = linear(x = x, weight = lin_weight_0, bias = lin_bias_0)[name = string("lin")];
                tensor<int32, [3]> shp = shape(x = lin)[name = string("shp")];
                int32 n_axis_0 = const()[name = string("n_axis_0"), val = int32(0)];
                int32 n_batch_dims_0 = const()[name = string("n_batch_dims_0"), val = int32(0)];
                bool n_validate_indices_0 = const()[name = string("n_validate_indices_0"), val = bool(false)];
                string shp_to_int16_dtype_0 = const()[name = string("shp_to_int16_dtype_0"), val = string("int16")];
                uint16 n_indices_0_to_uint16 = const()[name = string("n_indices_0_to_uint16"), val = uint16(1)];
                tensor<int16, [3]> shp_to_int16 = cast(x = shp, dtype = shp_to_int16_dtype_0)[name = string("cast_1")];
                int16 n_cast_uint16 = gather(x = shp_to_int16, indices = n_indices_0_to_uint16, axis = n_axis_0, batch_dims = n_batch_dims_0, validate_indices = n_validate_indices_0)[name = string("n_cast_uint16")];
                string nf_dtype_0 = const()[name = string("nf_dtype_0"), val = string("fp16")];
                fp16 n_cast_uint16_to_fp16 = cast(x = n_cast_uint16, dtype = nf_dtype_0)[name = string("cast_0")];
                tensor<fp16, [1, ?, 4]> y = mul(x = lin, y = n_cast_uint16_to_fp16)[name = string("y")];
            } -> (y);
        }
        [exit 0]

    "#]].assert_eq(&bench.transcript(&[
        "inspect flexible_range_ios18.mlpackage",
        "inspect multifunction_state_ios18.mlpackage",
        "inspect silero_vad_palette4.mlpackage --weights",
        "inspect flexible_range_ios18.mlpackage --text",
    ]));
}

#[test]
fn other_models_are_named() {
    let bench = Bench::with_packages(&[
        "identity.mlmodel",
        "sentiment_pipeline.mlmodel",
        "silero_vad_compiled.mlmodelc",
    ]);
    expect![[r#"
        $ silane inspect identity.mlmodel
        identity.mlmodel: a neural network of 1 layer (`neuralNetwork`)
          specification version 1

        inputs
          x  fp32 [2]

        outputs
          y  fp32 [2]

        ops: 1
          activation  1
        [exit 0]

        $ silane inspect sentiment_pipeline.mlmodel
        sentiment_pipeline.mlmodel: a pipeline of 2 models (pipeline, glmClassifier)
          specification version 1

        inputs
          input  dictionary of string  Features extracted from the text.

        outputs
          classLabel        string                The most likely polarity (positive or negative), for the given input.
          classProbability  dictionary of string  The probabilities for each class label, for the given input.

        model 0: a pipeline of 2 models (dictVectorizer, featureVectorizer)

        inputs
          input  dictionary of string

        outputs
          __feature_vector__  fp64 [16043]

        model 0 / model 0: a model of the kind `dictVectorizer`

        inputs
          input  dictionary of string

        outputs
          __sparse_vector_features__  dictionary of int64

        model 0 / model 1: a model of the kind `featureVectorizer`

        inputs
          __sparse_vector_features__  dictionary of int64

        outputs
          __feature_vector__  fp64 [16043]

        model 1: a model of the kind `glmClassifier`

        inputs
          __feature_vector__  fp64 [16043]

        outputs
          classLabel        string
          classProbability  dictionary of string
        [exit 0]

        $ silane inspect silero_vad_compiled.mlmodelc
        silero_vad_compiled.mlmodelc: a compiled bundle (`.mlmodelc`)
          specification version 6

        ops: 137
          const           89
          cast            12
          conv             6
          expand_dims      5
          relu             5
          clip             4
          squeeze          4
          add              2
          pow              2
          slice_by_index   2
          transpose        2
          lstm             1
          pad              1
          sigmoid          1
          sqrt             1
        [exit 0]

        $ silane inspect identity.mlmodel --text
        stderr: error: identity.mlmodel: a neural network of 1 layer (`neuralNetwork`), not an ML Program
        stderr:   hint: convert the original model to an ML Program, iOS 15 and later
        [exit 2]

        $ silane inspect sentiment_pipeline.mlmodel --weights
        stderr: error: sentiment_pipeline.mlmodel: a pipeline of 2 models (pipeline, glmClassifier), not an ML Program
        stderr:   hint: `inspect` lists the models in it
        [exit 2]

        $ silane inspect silero_vad_compiled.mlmodelc --lint
        stderr: error: silero_vad_compiled.mlmodelc: a compiled bundle (`.mlmodelc`), not an ML Program
        stderr:   hint: open the package it was compiled from; a bundle cannot be turned back
        [exit 2]

        $ silane run identity.mlmodel --prompt a
        stderr: error: identity.mlmodel: a neural network of 1 layer (`neuralNetwork`), not an ML Program
        stderr:   hint: convert the original model to an ML Program, iOS 15 and later
        [exit 2]

    "#]].assert_eq(&bench.transcript(&[
        "inspect identity.mlmodel",
        "inspect sentiment_pipeline.mlmodel",
        "inspect silero_vad_compiled.mlmodelc",
        "inspect identity.mlmodel --text",
        "inspect sentiment_pipeline.mlmodel --weights",
        "inspect silero_vad_compiled.mlmodelc --lint",
        "run identity.mlmodel --prompt a",
    ]));
    for (name, kind) in [
        ("identity.mlmodel", "neuralNetwork"),
        ("sentiment_pipeline.mlmodel", "pipelineClassifier"),
        ("silero_vad_compiled.mlmodelc", "compiled"),
    ] {
        let ran = bench.run(&["inspect", name, "--json"]);
        assert_eq!((ran.code, ran.err.as_str(), ran.json()["kind"].as_str()), (0, "", Some(kind)));
    }
}

#[test]
fn what_is_no_model_is_told_apart() {
    let bench = Bench::with_packages(&["conv_ios16.mlpackage"]);
    let write = |name: &str, bytes: &[u8]| fs::write(bench.path(name), bytes).unwrap();
    write("pointer.mlmodel", POINTER.as_bytes());
    write("notes.txt", b"a text\n");
    write("archive.mlpackage", b"PK\x03\x04\x14\x00");
    write("nothing.mlmodel", b"");
    write("noise.mlmodel", &[1; 64]);
    fs::create_dir(bench.path("empty.mlpackage")).unwrap();
    fs::create_dir(bench.path("checkpoint")).unwrap();
    write("checkpoint/config.json", b"{}");
    write("conv_ios16.mlpackage/Data/com.apple.CoreML/model.mlmodel", POINTER.as_bytes());
    expect![[r#"
        $ silane inspect pointer.mlmodel
        stderr: error: pointer.mlmodel: a Git LFS pointer, not the model
        stderr:   hint: run `git lfs pull` where it was cloned
        [exit 2]

        $ silane inspect conv_ios16.mlpackage
        stderr: error: conv_ios16.mlpackage/Data/com.apple.CoreML/model.mlmodel: a Git LFS pointer, not the model
        stderr:   hint: run `git lfs pull` where it was cloned
        [exit 2]

        $ silane inspect notes.txt
        stderr: error: notes.txt: a text file, not a model
        stderr:   hint: MIL text is not read; open the package that it came from
        [exit 2]

        $ silane inspect archive.mlpackage
        stderr: error: archive.mlpackage: a zip archive
        stderr:   hint: unpack it and open the package inside
        [exit 2]

        $ silane inspect nothing.mlmodel
        stderr: error: nothing.mlmodel: the file is empty
        [exit 2]

        $ silane inspect noise.mlmodel
        stderr: error: noise.mlmodel: not a Core ML model: a field takes 8 bytes, 0 are left
        stderr:   hint: it is damaged, cut short, written by a pre-release of Core ML, or of another format
        [exit 2]

        $ silane inspect empty.mlpackage
        stderr: error: empty.mlpackage is an empty directory
        [exit 2]

        $ silane inspect checkpoint
        stderr: error: checkpoint: this is a checkpoint, not a package
        stderr:   hint: `silane convert` makes a package of it
        [exit 2]

        $ silane inspect .
        stderr: error: .: this is a folder of packages
        stderr:   hint: give one of them: `./archive.mlpackage`, `./conv_ios16.mlpackage`, `./empty.mlpackage`
        [exit 2]

        $ silane inspect nowhere.mlpackage
        stderr: error: nowhere.mlpackage: No such file or directory (os error 2)
        [exit 2]

    "#]].assert_eq(&bench.transcript(&[
        "inspect pointer.mlmodel",
        "inspect conv_ios16.mlpackage",
        "inspect notes.txt",
        "inspect archive.mlpackage",
        "inspect nothing.mlmodel",
        "inspect noise.mlmodel",
        "inspect empty.mlpackage",
        "inspect checkpoint",
        "inspect .",
        "inspect nowhere.mlpackage",
    ]));
}

/// The graph is shown without its weights, and what is missing is said.
#[test]
fn weights_may_be_missing() {
    let bench = Bench::with_packages(&["silero_vad_no_weights.mlpackage", "conv_ios16.mlpackage"]);
    let weights = bench.path("conv_ios16.mlpackage/Data/com.apple.CoreML/weights/weight.bin");
    fs::write(weights, POINTER).unwrap();
    expect![[r#"
        $ silane inspect silero_vad_no_weights.mlpackage
        silero_vad_no_weights.mlpackage: ML Program, CoreML5 (iOS 15, macOS 12), specification version 6
          description: Silero VAD Unified Model (STFT + Encoder + Decoder)
          author: Fluid Infernece + Silero Team
          version: 6.0.0
          com.github.apple.coremltools.conversion_date: 2025-09-15
          com.github.apple.coremltools.source: torch==2.7.0
          com.github.apple.coremltools.source_dialect: TorchScript
          com.github.apple.coremltools.version: 9.0b1

        inputs
          audio_input   fp32 [1, 576]
          hidden_state  fp32 [1, 128]
          cell_state    fp32 [1, 128]

        outputs
          vad_output        fp32 [1, 1, 1]
          new_hidden_state  fp32 [1, 128]
          new_cell_state    fp32 [1, 128]

        ops: 48
          cast            12
          conv             6
          expand_dims      5
          relu             5
          clip             4
          squeeze          4
          add              2
          pow              2
          slice_by_index   2
          transpose        2
          lstm             1
          pad              1
          sigmoid          1
          sqrt             1

        weights: 881.4 kB in 13 tensors
          fp16  10  355.1 kB
          fp32   3  526.3 kB
        stderr: note: weight file silero_vad_no_weights.mlpackage/Data/com.apple.CoreML/weights/weight.bin is missing
        [exit 0]

        $ silane inspect conv_ios16.mlpackage
        conv_ios16.mlpackage: ML Program, CoreML6 (iOS 16, macOS 13), specification version 7
          com.github.apple.coremltools.conversion_date: 2026-11-29
          com.github.apple.coremltools.source: milinternal
          com.github.apple.coremltools.version: 9.0

        inputs
          x  fp16 [1, 3, 8, 8]

        outputs
          y  fp16 [1, 2, 4, 4]

        ops: 5
          conv            2
          conv_transpose  1
          max_pool        1
          relu            1

        weights: 352 B in 3 tensors
          fp16  3  352 B
        stderr: note: conv_ios16.mlpackage/Data/com.apple.CoreML/weights/weight.bin is a Git LFS pointer, not the weights
        [exit 0]

        $ silane inspect conv_ios16.mlpackage --weights
        name            type               stored as          bits/weight  bytes
        conv0_weight_0  fp16 [4, 3, 3, 3]  fp16 [4, 3, 3, 3]        16.00    216
        dw_weight_0     fp16 [4, 1, 3, 3]  fp16 [4, 1, 3, 3]        16.00     72
        ct_weight_0     fp16 [4, 2, 2, 2]  fp16 [4, 2, 2, 2]        16.00     64
        stderr: note: conv_ios16.mlpackage/Data/com.apple.CoreML/weights/weight.bin is a Git LFS pointer, not the weights
        [exit 0]

        $ silane inspect conv_ios16.mlpackage --dump ct_weight_0 w.npy
        stderr: error: main: const → ct_weight_0: conv_ios16.mlpackage/Data/com.apple.CoreML/weights/weight.bin is a Git LFS pointer, not the weights
        stderr:   hint: run `git lfs pull` where it was cloned; the graph can still be inspected
        [exit 2]

    "#]].assert_eq(&bench.transcript(&[
        "inspect silero_vad_no_weights.mlpackage",
        "inspect conv_ios16.mlpackage",
        "inspect conv_ios16.mlpackage --weights",
        "inspect conv_ios16.mlpackage --dump ct_weight_0 w.npy",
    ]));
    assert!(!bench.path("w.npy").exists());
    let json = bench.run(&["inspect", "conv_ios16.mlpackage", "--json"]).json();
    assert!(json["unreadable_weights"][0].as_str().unwrap().contains("Git LFS pointer"));
}

#[test]
fn weights_are_dumped_for_numpy() {
    let bench = Bench::with_packages(&["conv_ios16.mlpackage", "lut6_ios18.mlpackage"]);
    for (package, name, shape) in
        [("conv_ios16.mlpackage", "ct_weight_0", "(4,2,2,2,)"), ("lut6_ios18.mlpackage", "w3", "(5,9,)")]
    {
        let ran = bench.run(&["inspect", package, "--dump", name, "w.npy"]);
        assert_eq!((ran.code, ran.out.as_str(), ran.err.as_str()), (0, "", ""));
        let file = fs::read(bench.path("w.npy")).unwrap();
        assert!(file.starts_with(b"\x93NUMPY\x01\x00"));
        let header = usize::from(u16::from_le_bytes([file[8], file[9]]));
        let text = String::from_utf8(file[10..10 + header].to_vec()).unwrap();
        assert!(text.contains("'<f4'") && text.contains(shape) && text.ends_with('\n'), "{text}");
        let count: usize =
            shape.split(|c: char| !c.is_ascii_digit()).filter_map(|d| d.parse::<usize>().ok()).product();
        assert_eq!((10 + header) % 64, 0);
        let values: Vec<f32> =
            file[10 + header..].as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        assert!(values.len() == count && values.iter().any(|v| *v != values[0]), "{package}: {values:?}");
    }
    let ran = bench.run(&["inspect", "conv_ios16.mlpackage", "--dump", "nothing", "w.npy"]);
    assert!(ran.code == 2 && ran.err.contains("`nothing`") && ran.err.contains("--weights"), "{}", ran.err);
}

/// Rules that are broken are counted at a glance, listed on demand, and are the answer no.
#[test]
fn broken_rules_are_listed() {
    let bench = Bench::with_packages(&["conv_ios16.mlpackage", "state_ios18.mlpackage"]);
    let sound = bench.run(&["inspect", "conv_ios16.mlpackage", "--lint"]);
    assert!(sound.code == 0 && sound.out.ends_with("0 errors, 0 notes\n"), "{}", sound.out);
    // The state is renamed in the description only: a name of the same length, in the first place it has.
    let model = bench.path("state_ios18.mlpackage/Data/com.apple.CoreML/model.mlmodel");
    let mut bytes = fs::read(&model).unwrap();
    let name = b"k_cache";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap();
    bytes[at..at + name.len()].copy_from_slice(b"k_cashe");
    fs::write(&model, bytes).unwrap();
    expect![[r#"
        $ silane inspect state_ios18.mlpackage
        state_ios18.mlpackage: ML Program, CoreML8 (iOS 18, macOS 15), specification version 9
          com.github.apple.coremltools.conversion_date: 2026-11-29
          com.github.apple.coremltools.source: milinternal
          com.github.apple.coremltools.version: 9.0

        inputs
          k_new  fp16 [1, 2, 1, 8]
          pos    int32 [1]

        outputs
          y  fp16 [1, 2, 4]

        states
          k_cashe  state fp16 [1, 2, 16, 8]

        ops: 9
          concat        2
          read_state    2
          add           1
          linear        1
          reduce_sum    1
          slice_update  1
          write_state   1

        weights: 64 B in 1 tensor
          fp16  1  64 B

        2 broken rules, 1 note; `--lint` lists them
        [exit 0]

        $ silane inspect state_ios18.mlpackage --lint
        state_ios18.mlpackage: ML Program, CoreML8 (iOS 18, macOS 15), specification version 9
          com.github.apple.coremltools.conversion_date: 2026-11-29
          com.github.apple.coremltools.source: milinternal
          com.github.apple.coremltools.version: 9.0

        inputs
          k_new  fp16 [1, 2, 1, 8]
          pos    int32 [1]

        outputs
          y  fp16 [1, 2, 4]

        states
          k_cashe  state fp16 [1, 2, 16, 8]

        ops: 9
          concat        2
          read_state    2
          add           1
          linear        1
          reduce_sum    1
          slice_update  1
          write_state   1

        weights: 64 B in 1 tensor
          fp16  1  64 B

        note: main: k_cache: the last size is 8, the Neural Engine wants a multiple of 32 [state]
        error: main: state `k_cache` of the program is not described [described]
        error: main: `k_cashe` is described, the program takes no such input [described]
        2 errors, 1 note
        [exit 1]

    "#]]
    .assert_eq(&bench.transcript(&["inspect state_ios18.mlpackage", "inspect state_ios18.mlpackage --lint"]));
}
