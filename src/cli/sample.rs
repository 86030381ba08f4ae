//! Inputs to compare a package and its reference on: always the same ones for the same checkpoint.

use crate::{
    checkpoint::{Checkpoint, Tokenizer},
    error::Result,
    reference::Inputs,
};

/// Texts of several lengths and kinds; what a tokenizer does not know becomes its unknown token.
const TEXTS: [&str; 4] = [
    "The quick brown fox jumps over the lazy dog, and then it sleeps.",
    "Is it 12.5 km, or 13? Nobody knows!",
    "CC(=O)Oc1ccccc1C(=O)O",
    "naïve café — Straße, 東京",
];

/// Rounds of inputs `[batch, tokens]`: random ids in full, with padding behind and in front, a row of
/// nothing but padding where there is more than one, and text where there is a tokenizer.
pub(super) fn rounds(
    checkpoint: &Checkpoint,
    batch: usize,
    tokens: usize,
    types: bool,
) -> Result<Vec<Inputs>> {
    let config = &checkpoint.config;
    let vocabulary = config.usize(&["vocab_size"])?.max(1);
    let pad = config.usize_or(&["pad_token_id"], 0)?;
    let mut draw = Draw(0x5151_a4e5);
    let mut rounds = Vec::new();
    for padding in [Padding::None, Padding::Behind, Padding::Before] {
        let mut inputs = Inputs { input_ids: Vec::new(), attention_mask: Vec::new(), token_type_ids: None };
        for row in 0..batch {
            let real = match padding {
                Padding::None => tokens,
                _ if row > 0 && row + 1 == batch => 0,
                _ => (tokens * 2 / 3 + row).clamp(1, tokens),
            };
            let mask: Vec<u32> = (0..tokens)
                .map(|i| match padding {
                    Padding::Before => u32::from(i >= tokens - real),
                    _ => u32::from(i < real),
                })
                .collect();
            let ids = mask.iter().map(|m| if *m == 1 { draw.id(vocabulary, pad) } else { id(pad) });
            inputs.input_ids.push(ids.collect());
            inputs.attention_mask.push(mask);
        }
        rounds.push(inputs);
    }
    if let Ok(tokenizer) = checkpoint.tokenizer() {
        rounds.push(texts(&tokenizer, batch, tokens, vocabulary, pad)?);
    }
    if types {
        for inputs in &mut rounds {
            let segments = |row: &Vec<u32>| (0..row.len()).map(|i| u32::from(i > row.len() / 2)).collect();
            inputs.token_type_ids = Some(inputs.input_ids.iter().map(segments).collect());
        }
    }
    Ok(rounds)
}

enum Padding {
    None,
    Behind,
    Before,
}

fn texts(
    tokenizer: &Tokenizer,
    batch: usize,
    tokens: usize,
    vocabulary: usize,
    pad: usize,
) -> Result<Inputs> {
    let texts: Vec<&str> = TEXTS.into_iter().cycle().take(batch).collect();
    let mut inputs = Inputs { input_ids: Vec::new(), attention_mask: Vec::new(), token_type_ids: None };
    for text in texts {
        let encoding = tokenizer.encode_cut(text, tokens)?;
        let mut ids: Vec<u32> = encoding.ids;
        // Ids that the table does not have would be another model's tokenizer; the pad id stands in.
        ids.iter_mut().filter(|i| **i as usize >= vocabulary).for_each(|i| *i = id(pad));
        let real = ids.len().min(tokens);
        ids.resize(tokens, id(pad));
        inputs.input_ids.push(ids);
        inputs.attention_mask.push((0..tokens).map(|i| u32::from(i < real)).collect());
    }
    Ok(inputs)
}

fn id(i: usize) -> u32 {
    u32::try_from(i).unwrap_or(0)
}

/// A linear congruential generator: the same draws everywhere.
struct Draw(u64);

impl Draw {
    /// A token id that is not the padding's.
    fn id(&mut self, vocabulary: usize, pad: usize) -> u32 {
        loop {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let drawn = (self.0 >> 33) as usize % vocabulary;
            if drawn != pad || vocabulary == 1 {
                return id(drawn);
            }
        }
    }
}
