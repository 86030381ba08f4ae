//! Language models: chat templates, perplexity, and the layer that is off.

use std::{fs, path::Path};

use expect_test::expect;
use serde_json::{Value, json};
use silane::{
    checkpoint::{ChatTemplate, Checkpoint},
    reference::Decoder,
};

use super::{Bench, models::Model};

/// Template, system's message, prompt; all of `U: hi`.
#[test]
fn templates_render_as_in_transformers() {
    let alternate =
        "{%- if messages[0].role == 'system' -%}\n{{ raise_exception('no system here') }}\n{%- endif -%}ok";
    let user = ("user", " hi ");
    for (template, system, expected) in [
        (
            "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'].strip() }}{{ eos_token }}{% endfor %}",
            None,
            "<s>[user]hi</s>",
        ),
        (
            "{% for m in messages %}\n  {% if m.content.startswith(' h') %}\n{{ m.content | trim }}\n  {% endif %}\n{% endfor %}",
            None,
            "hi\n",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}{{ m.role }} {% endfor %}{{ ns.n }}",
            Some("s"),
            "user system 2",
        ),
        ("{% if add_generation_prompt and not tools %}{{ '<a>' }}{% endif %}{{ pad_token }}", None, "<a>"),
        (
            "{% for m in messages %}{%- generation -%} {{ m.role }} {%- endgeneration %}{% endfor %}",
            None,
            "user",
        ),
        ("{% for m in messages %}{{ m.role }}{% break %}{% endfor %}", Some("s"), "system"),
        ("{{ strftime_now('%Y')[:2] }}", None, "20"),
        (alternate, None, "ok"),
        (alternate, Some("s"), "error: line 2: invalid operation: no system here"),
        ("a\n{% for %}", None, "error: line 2: syntax error: unexpected end of block, expected in"),
        (
            "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
            None,
            "error: line 1: engine ran out of fuel",
        ),
    ] {
        let dir = folder(&json!({ "chat_template": template }));
        let messages: Vec<_> = system.map(|s| ("system", s)).into_iter().chain([user]).collect();
        let seen = match ChatTemplate::open(dir.path()).unwrap().render(&messages) {
            Ok(text) => text,
            Err(e) => e.to_string().replacen(
                &format!("{}/tokenizer_config.json: chat template", dir.path().display()),
                "error",
                1,
            ),
        };
        assert_eq!(seen, expected, "{template}");
    }
}

#[test]
fn templates_are_found_where_transformers_keeps_them() {
    let list = json!({ "chat_template": [
        { "name": "tool_use", "template": "tools" },
        { "name": "default", "template": "listed" },
    ]});
    let render = |dir: &Path| ChatTemplate::open(dir).unwrap().render(&[("user", "hi")]).unwrap();
    let dir = folder(&list);
    assert_eq!(render(dir.path()), "listed");
    fs::write(dir.path().join("chat_template.jinja"), "{{ bos_token }} of a file").unwrap();
    assert_eq!(render(dir.path()), "<s> of a file");
    for other in [
        json!({}),
        json!({ "chat_template": [{ "name": "rag", "template": "" }] }),
        json!({ "chat_template": 1 }),
    ] {
        let dir = folder(&other);
        let error = ChatTemplate::open(dir.path()).unwrap_err();
        assert!(
            error.message().ends_with("there is no chat template") && error.way_out().is_some(),
            "{other}"
        );
    }
}

/// A folder whose tokenizer config also has two special tokens.
fn folder(settings: &Value) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = settings.clone();
    settings["bos_token"] = json!({ "content": "<s>", "lstrip": false });
    settings["eos_token"] = json!("</s>");
    fs::write(dir.path().join("tokenizer_config.json"), settings.to_string()).unwrap();
    dir
}

/// Special tokens that the template writes are not added again.
#[test]
fn a_template_makes_the_prompt() {
    let bench = Bench::with_models(&["tiny/llama", "tiny/bert"]);
    convert(&bench, "llama");
    assert_eq!(bench.run(&["convert", "bert", "-o", "bert.mlpackage"]).code, 0);
    let ask = |args: &[&str]| bench.run(&[&["run", "a.mlpackage", "--max-tokens", "4"], args].concat());
    let none = ask(&["--chat", "--prompt", "the cat"]);
    assert!(none.code == 2 && none.err.contains("there is no chat template"), "{}", none.err);
    let template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}";
    fs::write(bench.path("a/chat_template.jinja"), template).unwrap();
    let plain = ask(&["--prompt", "the cat sat"]);
    let prefill = |err: &str| err.split(" tokens").next().unwrap().to_string();
    for args in [&["--prompt", "the cat sat"][..], &["--system", "the cat", "--prompt", " sat"]] {
        let chat = ask(&[args, &["--chat"]].concat());
        assert_eq!((chat.code, &chat.out, prefill(&chat.err)), (0, &plain.out, prefill(&plain.err)));
    }
    expect![[r#"
        $ silane run bert.mlpackage --prompt a --chat
        stderr: error: bert.mlpackage: `--chat` is for language models
        [exit 2]

        $ silane run a.mlpackage
        stderr: error: there is nothing to run on
        stderr:   hint: give a text with `--prompt`, or tensors with `--inputs`
        [exit 2]

        $ silane validate bert.mlpackage --reference bert --text bert/config.json
        stderr: error: bert.mlpackage: `--text` is for language models
        [exit 2]

        $ silane validate a.mlpackage --reference llama/reference.safetensors --text llama/config.json
        stderr: error: `--text` needs a checkpoint to compare with
        stderr:   hint: give its folder to `--reference`
        [exit 2]

    "#]]
    .assert_eq(&bench.transcript(&[
        "run bert.mlpackage --prompt a --chat",
        "run a.mlpackage",
        "validate bert.mlpackage --reference bert --text bert/config.json",
        "validate a.mlpackage --reference llama/reference.safetensors --text llama/config.json",
    ]));
}

#[test]
fn perplexity_is_that_of_the_text() {
    let bench = Bench::with_models(&["tiny/llama"]);
    convert(&bench, "llama");
    let text = "the cat sat on the mat";
    fs::write(bench.path("text"), text).unwrap();
    let ran = bench.run(&["validate", "a.mlpackage", "--reference", "llama", "--text", "text", "--json"]);
    let seen = &ran.json()["perplexity"];
    let checkpoint = Checkpoint::open_dir(&bench.path("llama")).unwrap();
    let ids = checkpoint.tokenizer().unwrap().encode(text).unwrap().ids;
    let logits =
        Decoder::open(&checkpoint).unwrap().forward(std::slice::from_ref(&ids), None).unwrap().logits;
    let logits =
        candle_nn::ops::log_softmax(&logits, 2).unwrap().squeeze(0).unwrap().to_vec2::<f32>().unwrap();
    let sum: f32 = ids[1..].iter().zip(&logits).map(|(id, row)| row[*id as usize]).sum();
    let expected = f64::from((-sum / (ids.len() - 1) as f32).exp());
    assert_eq!(seen["tokens"], ids.len());
    for (who, limit) in [("reference", 1e-4), ("package", 2e-2)] {
        let off = seen[who].as_f64().unwrap() / expected - 1.0;
        assert!(off.abs() < limit, "{who}: {seen}, {expected}");
    }
}

/// Of several layouts of a layer, of a stream that the package keeps smaller, and of one that is rotated.
#[test]
fn the_first_layer_off_is_named() {
    for (name, tensor, options, expected) in [
        ("llama", "model.layers.1.mlp.down_proj.weight", &[][..], Some(1)),
        ("llama", "model.layers.1.mlp.down_proj.weight", &["--rotate"], Some(1)),
        ("llama", "model.norm.weight", &[], None),
        ("llama", "model.norm.weight", &["--rotate"], None),
        ("gpt2", "h.1.attn.c_attn.weight", &[], Some(1)),
        ("gemma2", "model.layers.1.mlp.up_proj.weight", &[], Some(1)),
        ("opt-350m", "model.decoder.layers.1.final_layer_norm.weight", &[], Some(1)),
    ] {
        let bench = Bench::with_models(&[&format!("tiny/{name}")]);
        let mut model = Model::load(&format!("tiny/{name}"));
        model.values(tensor).iter_mut().step_by(2).for_each(|v| *v = 4.0 * *v + 0.1);
        convert_with(&bench, model.write().path().to_str().unwrap(), options);
        let ran = bench.run(&["validate", "a.mlpackage", "--reference", name, "--json"]);
        let seen = &ran.json()["layers"]["first_off"];
        assert_eq!((ran.code, seen.as_u64()), (1, expected), "{name}, {tensor}: {}", ran.out);
        let said =
            expected.map_or("no layer of decode is off (".into(), |i| format!("first layer off: {i} ("));
        let ran = bench.run(&["validate", "a.mlpackage", "--reference", name]);
        assert!(ran.out.contains(&said), "{name}: {}", ran.out);
    }
}

fn convert(bench: &Bench, checkpoint: &str) {
    convert_with(bench, checkpoint, &[]);
}

fn convert_with(bench: &Bench, checkpoint: &str, options: &[&str]) {
    let args = ["--context-length", "64", "--prefill-chunk", "4"];
    let ran = bench.run(&[&["convert", checkpoint, "-o", "a.mlpackage"][..], &args, options].concat());
    assert_eq!(ran.code, 0, "{}", ran.err);
}

/// A prompt longer than the context is refused, and text stops where the context is full.
#[test]
fn the_context_is_never_passed() {
    let bench = Bench::with_models(&["tiny/llama"]);
    let sizes = ["--context-length", "32", "--prefill-chunk", "4"];
    assert_eq!(bench.run(&[&["convert", "llama", "-o", "l.mlpackage"][..], &sizes].concat()).code, 0);
    let long = "the cat ".repeat(40);
    let refused = bench.run(&["run", "l.mlpackage", "--prompt", &long]);
    assert!(refused.code == 2 && refused.err.contains("do not fit a context of 32"), "{}", refused.err);
    let full = bench.run(&["run", "l.mlpackage", "--prompt", "the cat", "--max-tokens", "100"]);
    assert!(full.code == 0 && full.err.contains("the context of 32 tokens is full"), "{}", full.err);
}

/// Parts replace a folder of packages when forced, and nothing else.
#[test]
fn parts_never_replace_what_is_no_package() {
    let bench = Bench::with_models(&["tiny/llama"]);
    let convert = ["convert", "llama", "-o", "out", "--parts", "3", "--context-length", "32", "--force"];
    fs::create_dir(bench.path("out")).unwrap();
    fs::write(bench.path("out/letter.txt"), "dear").unwrap();
    let refused = bench.run(&convert);
    assert!(refused.code == 2 && refused.err.contains("holds no packages"), "{}", refused.err);
    assert_eq!(fs::read_to_string(bench.path("out/letter.txt")).unwrap(), "dear");
    fs::remove_dir_all(bench.path("out")).unwrap();
    assert_eq!([bench.run(&convert).code, bench.run(&convert).code], [0, 0]);
}
