//! The tokenizer: `tokenizer.json`, and what the files beside it say about padding, masks and length.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tokenizers::{PostProcessor, TruncationDirection};

use super::read_json_if_any;
use crate::{
    bail,
    error::{Error, Result},
};

pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    pub mask_id: Option<u32>,
    pub pad_id: Option<u32>,
    /// The longest sequence that the tokenizer's config allows, if it says one.
    pub max_length: Option<usize>,
}

/// One text (or pair) as ids; the three have equal lengths.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Encoding {
    pub ids: Vec<u32>,
    pub attention_mask: Vec<u32>,
    pub type_ids: Vec<u32>,
}

/// Files that a host needs to tokenize; those that are there are carried along with a package.
const FILES: [&str; 10] = [
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];

/// The tokenizer and config files of a checkpoint that are to be copied beside a package.
pub fn tokenizer_files(dir: &Path) -> Vec<PathBuf> {
    FILES.iter().map(|name| dir.join(name)).filter(|path| path.is_file()).collect()
}

impl Tokenizer {
    pub fn open(dir: &Path) -> Result<Tokenizer> {
        let path = dir.join("tokenizer.json");
        if !path.is_file() {
            bail!(
                "{}: there is no `tokenizer.json`", dir.display();
                hint: "write one with Transformers: `AutoTokenizer.from_pretrained(dir).save_pretrained(dir)`"
            );
        }
        let mut inner = tokenizers::Tokenizer::from_file(&path)
            .map_err(|e| Error::new(format!("{}: {e}", path.display())))?;
        // As in Transformers, what the file says about padding and truncation is only a past call's setting.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|e| Error::new(format!("{}: {e}", path.display())))?;
        let settings = [
            read_json_if_any(&dir.join("tokenizer_config.json"))?,
            read_json_if_any(&dir.join("special_tokens_map.json"))?,
        ];
        let special = |key: &str| {
            let token = settings.iter().flatten().find_map(|s| token_text(s.get(key)?))?;
            inner.token_to_id(token)
        };
        // Transformers writes 1e30 for "no limit".
        let max_length = settings[0]
            .as_ref()
            .and_then(|s| s.get("model_max_length")?.as_u64())
            .and_then(|n| usize::try_from(n).ok())
            .filter(|n| *n < 1 << 32);
        Ok(Tokenizer { mask_id: special("mask_token"), pad_id: special("pad_token"), max_length, inner })
    }

    /// The ids of a text with its special tokens.
    pub fn encode(&self, text: &str) -> Result<Encoding> {
        self.inner.encode(text, true).map(Encoding::from).map_err(failed)
    }

    /// The ids of a text in which special tokens are written out; none are added.
    pub fn encode_written(&self, text: &str) -> Result<Encoding> {
        self.inner.encode(text, false).map(Encoding::from).map_err(failed)
    }

    /// The ids of two texts, such as a question and a passage.
    pub fn encode_pair(&self, first: &str, second: &str) -> Result<Encoding> {
        self.inner.encode((first, second), true).map(Encoding::from).map_err(failed)
    }

    /// The ids of a text cut to `length` tokens, special ones included.
    pub fn encode_cut(&self, text: &str, length: usize) -> Result<Encoding> {
        self.cut(text, length).map(Encoding::from).map_err(failed)
    }

    /// The ids of a long text in rows of `length` tokens, the last shorter; each has the special tokens of a text.
    pub fn encode_rows(&self, text: &str, length: usize) -> Result<Vec<Encoding>> {
        let mut first = self.inner.encode(text, false).map_err(failed)?;
        first.truncate(self.without_special(length).max(1), 0, TruncationDirection::Right);
        let rest = first.take_overflowing();
        let row = |row| self.inner.post_process(row, None, true).map(Encoding::from).map_err(failed);
        [first].into_iter().chain(rest).map(row).collect()
    }

    /// Several texts, cut and padded to `length`, or padded to the longest of them.
    pub fn encode_batch(&self, texts: &[&str], length: Option<usize>) -> Result<Vec<Encoding>> {
        let mut batch = Vec::with_capacity(texts.len());
        for text in texts {
            batch.push(match length {
                Some(length) => self.encode_cut(text, length)?,
                None => self.encode(text)?,
            });
        }
        let longest = batch.iter().map(|e| e.ids.len()).max().unwrap_or(0);
        let (length, pad) = (length.unwrap_or(longest), self.pad_id.unwrap_or(0));
        for encoding in &mut batch {
            encoding.pad(length, pad);
        }
        Ok(batch)
    }

    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.inner.decode(ids, skip_special).map_err(failed)
    }

    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    fn cut(&self, text: &str, length: usize) -> tokenizers::Result<tokenizers::Encoding> {
        let mut encoded = self.inner.encode(text, false)?;
        encoded.truncate(self.without_special(length), 0, TruncationDirection::Right);
        self.inner.post_process(encoded, None, true)
    }

    /// How many of so many tokens are the text's own.
    fn without_special(&self, length: usize) -> usize {
        length.saturating_sub(self.inner.get_post_processor().map_or(0, |p| p.added_tokens(false)))
    }
}

impl From<tokenizers::Encoding> for Encoding {
    fn from(e: tokenizers::Encoding) -> Self {
        Encoding {
            ids: e.get_ids().to_vec(),
            attention_mask: e.get_attention_mask().to_vec(),
            type_ids: e.get_type_ids().to_vec(),
        }
    }
}

impl Encoding {
    /// Pads at the end, to at least `length`.
    pub fn pad(&mut self, length: usize, pad_id: u32) {
        let length = length.max(self.ids.len());
        self.ids.resize(length, pad_id);
        self.attention_mask.resize(length, 0);
        self.type_ids.resize(length, 0);
    }
}

#[expect(clippy::needless_pass_by_value, reason = "the shape that `map_err` takes")]
fn failed(e: tokenizers::Error) -> Error {
    Error::new(format!("tokenizer: {e}"))
}

/// A special token is a string, or an object with the string in `content`.
pub(super) fn token_text(value: &Value) -> Option<&str> {
    value.as_str().or_else(|| value.get("content")?.as_str())
}
