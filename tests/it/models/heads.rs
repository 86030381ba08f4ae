//! Heads that no stored output covers, on stored bodies: the program against our reference.

use serde_json::{Value, json};
use silane::checkpoint::Task;

use super::{Model, assert_agrees, inputs};

type Graft = fn(&mut Model) -> &mut Model;

const LABELS: usize = 4;

#[test]
fn heads_agree_with_the_reference() {
    use Task::{MaskedLm, QuestionAnswering, SequenceClassification, TokenClassification};
    let pooled: Graft = |m| m.linear("classifier", LABELS, 36);
    let dense_and_out: Graft =
        |m| m.linear("classifier.dense", 36, 36).linear("classifier.out_proj", LABELS, 36);
    let distil: Graft = |m| m.linear("pre_classifier", 36, 36).linear("classifier", LABELS, 36);
    let modern: Graft =
        |m| m.linear("head.dense", 36, 36).norm("head.norm", 36).linear("classifier", LABELS, 36);
    let modern_mean: Graft = |m| {
        m.set("classifier_pooling", json!("mean"));
        m.linear("head.dense", 36, 36).norm("head.norm", 36).linear("classifier", LABELS, 36)
    };
    let modern_spans: Graft =
        |m| m.linear("head.dense", 36, 36).norm("head.norm", 36).linear("classifier", 2, 36);
    let spans: Graft = |m| m.linear("qa_outputs", 2, 36);
    let lm_head: Graft =
        |m| m.linear("lm_head.dense", 36, 36).norm("lm_head.layer_norm", 36).random("lm_head.bias", &[131]);
    let rows: [(&str, Task, Graft); 27] = [
        ("albert", SequenceClassification, pooled),
        ("bert", SequenceClassification, pooled),
        ("distilbert", SequenceClassification, distil),
        ("electra", SequenceClassification, dense_and_out),
        ("modernbert", SequenceClassification, modern),
        ("modernbert", SequenceClassification, modern_mean),
        ("mpnet", SequenceClassification, dense_and_out),
        ("roberta", SequenceClassification, dense_and_out),
        ("xlm-roberta", SequenceClassification, dense_and_out),
        ("albert", TokenClassification, pooled),
        ("bert", TokenClassification, pooled),
        ("electra", TokenClassification, pooled),
        ("modernbert", TokenClassification, modern),
        ("mpnet", TokenClassification, pooled),
        ("roberta", TokenClassification, pooled),
        ("albert", QuestionAnswering, spans),
        ("bert", QuestionAnswering, spans),
        ("distilbert", QuestionAnswering, spans),
        ("electra", QuestionAnswering, spans),
        ("modernbert", QuestionAnswering, modern_spans),
        ("mpnet", QuestionAnswering, spans),
        ("roberta", QuestionAnswering, spans),
        ("mpnet", MaskedLm, lm_head),
        ("xlm-roberta", MaskedLm, lm_head),
        ("albert", MaskedLm, |m| {
            m.linear("predictions.dense", 20, 36).norm("predictions.LayerNorm", 20);
            m.random("predictions.bias", &[131])
        }),
        ("distilbert", MaskedLm, |m| {
            m.linear("vocab_transform", 36, 36).norm("vocab_layer_norm", 36);
            m.linear("vocab_projector", 131, 36)
        }),
        ("electra", MaskedLm, |m| {
            m.linear("generator_predictions.dense", 20, 36).norm("generator_predictions.LayerNorm", 20);
            m.random("generator_lm_head.bias", &[131])
        }),
    ];
    for (name, task, graft) in rows {
        let mut model = Model::load(&format!("tiny/{name}"));
        graft(&mut model);
        let (_dir, checkpoint) = model.open();
        assert_agrees(name, &checkpoint, task, &padded(&checkpoint));
    }
}

/// Sentence embeddings by every mode that is written, normalized or not.
#[test]
fn embeddings_agree_with_the_reference() {
    for name in ["bert", "roberta", "modernbert"] {
        for mode in ["pooling_mode_cls_token", "pooling_mode_mean_tokens", "pooling_mode_max_tokens", ""] {
            for normalize in [false, true] {
                let mut model = Model::load(&format!("tiny/{name}"));
                if !mode.is_empty() {
                    describe_pooling(&mut model, mode, normalize);
                }
                let (_dir, checkpoint) = model.open();
                let what = format!("{name}, {mode}, normalized {normalize}");
                assert_agrees(&what, &checkpoint, Task::Embedding, &padded(&checkpoint));
            }
        }
    }
}

/// A task whose tensors are not there says which one it misses.
#[test]
fn a_head_that_is_not_there_is_named() {
    for (name, task, tensor) in [
        ("bert", Task::SequenceClassification, "`classifier.weight`"),
        ("bert", Task::MaskedLm, "`cls.predictions.transform.dense.weight`"),
        ("roberta", Task::SequenceClassification, "`classifier.dense.weight`"),
        ("modernbert", Task::QuestionAnswering, "`head.dense.weight`"),
        ("electra", Task::PreTraining, "`discriminator_predictions.dense.weight`"),
    ] {
        let checkpoint = super::open(&super::fixture(&format!("tiny/{name}")));
        let plan = super::Plan { task, ..super::plan(&checkpoint, 1, 4) };
        let message = super::try_build(&checkpoint, &plan).unwrap_err().to_string();
        for word in [tensor, "made for feature-extraction"] {
            assert!(message.contains(word), "{word} is not in: {message}");
        }
    }
}

fn describe_pooling(model: &mut Model, mode: &str, normalize: bool) {
    let mut modules =
        vec![json!({"type": "Transformer", "path": ""}), json!({"type": "Pooling", "path": "1_Pooling"})];
    if normalize {
        modules.push(json!({"type": "Normalize", "path": "2_Normalize"}));
    }
    model.file("modules.json", &Value::Array(modules));
    model.file("1_Pooling/config.json", &json!({ mode: true }));
}

/// Rows of several lengths, the last with its padding in front.
fn padded(checkpoint: &silane::checkpoint::Checkpoint) -> silane::reference::Inputs {
    let pad = u32::try_from(checkpoint.config.usize(&["pad_token_id"]).unwrap()).unwrap();
    inputs(
        &[&[5, 9, 7, 11, 6, 8], &[12, 13, 14, pad, pad, pad], &[pad, pad, 21, 22, 23, 24]],
        Some(&[&[1, 1, 1, 1, 1, 1], &[1, 1, 1, 0, 0, 0], &[0, 0, 1, 1, 1, 1]]),
    )
}
