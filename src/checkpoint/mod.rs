//! A Hugging Face checkpoint: its config, its tensors, its tokenizer and its sentence-transformers files.
//!
//! The one rule: what cannot be read exactly is refused when the checkpoint is opened, with the file and
//! the reason; what is merely odd is said in [`Checkpoint::notes`].

mod architecture;
mod chat;
mod config;
pub mod hub;
mod pooling;
mod quantized;
mod rotate;
mod safetensors;
mod task;
mod tensors;
mod tokenizer;
mod weights;

use std::path::{Path, PathBuf};

pub use chat::ChatTemplate;
pub use config::Config;
pub use pooling::{Pooling, PoolingMode};
pub use rotate::{Fold, Scale, Table};
pub use task::Task;
pub use tensors::{Info, Tensors};
pub use tokenizer::{Encoding, Tokenizer, tokenizer_files};

use crate::{
    bail,
    error::{Result, io},
};

#[derive(Debug, Clone)]
pub struct Checkpoint {
    pub dir: PathBuf,
    pub config: Config,
    pub tensors: Tensors,
    /// The id it was found by, when it was one of the Hub's.
    pub hub_id: Option<String>,
    /// Whether the tensors compute what those of the files do by rotated activations.
    pub rotated: bool,
    /// What the user should know, though nothing is wrong.
    pub notes: Vec<String>,
}

impl Checkpoint {
    /// Opens a folder, or a Hub id that is in the local cache.
    pub fn open(path_or_hub_id: &str) -> Result<Checkpoint> {
        let path = Path::new(path_or_hub_id);
        if path.is_dir() {
            return Checkpoint::open_dir(path);
        }
        if path.is_file() {
            bail!("{path_or_hub_id}: this is a file, a checkpoint is a folder"; hint: "give the folder that holds `config.json`");
        }
        let mut checkpoint = Checkpoint::open_dir(&hub::resolve(path_or_hub_id)?)?;
        checkpoint.hub_id = path_or_hub_id.split('@').next().map(str::to_string);
        Ok(checkpoint)
    }

    pub fn open_dir(dir: &Path) -> Result<Checkpoint> {
        let config_path = dir.join("config.json");
        if !config_path.is_file() {
            weights::refuse_adapter(dir)?;
            bail!("{}: there is no `config.json`", dir.display(); hint: "a checkpoint is a folder with `config.json` and `model.safetensors`, as `save_pretrained` writes it");
        }
        let config = Config::open(&config_path)?;
        let files = weights::find(dir)?;
        let mut notes = files.notes.clone();
        let tensors = Tensors::open(&files, &config, &mut notes)?;
        Ok(Checkpoint { dir: dir.to_path_buf(), config, tensors, hub_id: None, rotated: false, notes })
    }

    /// Every file that a conversion reads: config, weights, and the sentence-transformers files.
    pub fn files(&self) -> Vec<PathBuf> {
        let mut files: Vec<PathBuf> = ["config.json", "modules.json", "1_Pooling/config.json"]
            .iter()
            .map(|name| self.dir.join(name))
            .filter(|path| path.is_file())
            .collect();
        files.extend(self.tensors.names().filter_map(|n| Some(self.tensors.get(n)?.file.to_path_buf())));
        files.sort();
        files.dedup();
        files
    }

    /// What the checkpoint was made for: embedding when sentence-transformers files are there, else what
    /// `architectures` says.
    pub fn task(&self) -> Result<Task> {
        if self.dir.join("modules.json").is_file() {
            return Ok(Task::Embedding);
        }
        Task::of(&self.config)
    }

    /// How sentence-transformers pools, if its files are there.
    pub fn pooling(&self) -> Result<Option<Pooling>> {
        Pooling::open(&self.dir)
    }

    pub fn tokenizer(&self) -> Result<Tokenizer> {
        Tokenizer::open(&self.dir)
    }
}

/// Reads a JSON file.
fn read_json(path: &Path) -> Result<serde_json::Value> {
    let text = std::fs::read(path).map_err(|e| io(path, &e))?;
    match serde_json::from_slice(&text) {
        Ok(value) => Ok(value),
        Err(_) if safetensors::lfs_pointer(&text).is_some() => bail!(
            "{}: this is a Git LFS pointer, not the file it stands for", path.display();
            hint: "fetch the files with `git lfs pull`"
        ),
        Err(e) => bail!("{}: not valid JSON: {e}", path.display()),
    }
}

/// Reads a JSON file that need not be there.
fn read_json_if_any(path: &Path) -> Result<Option<serde_json::Value>> {
    if path.is_file() { read_json(path).map(Some) } else { Ok(None) }
}
