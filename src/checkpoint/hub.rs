//! Hub ids, looked up in the local cache that every Hugging Face tool shares; nothing is downloaded.

use std::path::{Path, PathBuf};

use crate::{
    bail,
    error::{Result, io},
};

/// The folder of `org/name` or `org/name@revision` in the local cache.
pub fn resolve(id: &str) -> Result<PathBuf> {
    match cache_dir() {
        Some(cache) => resolve_in(&cache, id),
        None => bail!("{id}: there is no such folder, and no home folder to look for the Hub's cache in"),
    }
}

/// As [`resolve`], in a cache folder that is given.
pub fn resolve_in(cache: &Path, id: &str) -> Result<PathBuf> {
    let (repo, revision) = id.split_once('@').unwrap_or((id, "main"));
    if !is_id(repo) || !is_revision(revision) {
        bail!("{id}: there is no such folder, and it is not a Hub id (`org/name`)");
    }
    let folder = cache.join(format!("models--{}", repo.replace('/', "--")));
    if !folder.is_dir() {
        bail!(
            "{id}: there is no such folder, and it is not in the Hub's cache at {}", cache.display();
            hint: "download it with `hf download {repo}`"
        );
    }
    let reference = folder.join("refs").join(revision);
    let commit = match std::fs::read_to_string(&reference) {
        Ok(text) => text.trim().to_string(),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => revision.to_string(),
        Err(e) => return Err(io(&reference, &e)),
    };
    let snapshot = folder.join("snapshots").join(&commit);
    if !is_revision(&commit) || !snapshot.is_dir() {
        bail!(
            "{id}: the Hub's cache has no snapshot of revision `{revision}` in {}", folder.display();
            hint: "download it with `hf download {repo} --revision {revision}`"
        );
    }
    Ok(snapshot)
}

/// Where the environment says the cache is: `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME` or the home folder.
fn cache_dir() -> Option<PathBuf> {
    let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    var("HF_HUB_CACHE")
        .or_else(|| var("HUGGINGFACE_HUB_CACHE"))
        .or_else(|| var("HF_HOME").map(|home| home.join("hub")))
        .or_else(|| var("XDG_CACHE_HOME").map(|cache| cache.join("huggingface/hub")))
        .or_else(|| std::env::home_dir().map(|home| home.join(".cache/huggingface/hub")))
}

fn is_id(repo: &str) -> bool {
    let parts: Vec<&str> = repo.split('/').collect();
    parts.len() <= 2 && parts.iter().all(|part| is_word(part))
}

fn is_revision(revision: &str) -> bool {
    revision.split('/').all(is_word)
}

fn is_word(s: &str) -> bool {
    !s.is_empty()
        && !s.starts_with('.')
        && s.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}
