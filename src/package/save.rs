//! Writing a package: beside its place first, then moved there in one step.

use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use prost::Message;
use sha2::{Digest, Sha256};

use super::{
    AUTHOR, Interface, Manifest, Package,
    blob::Writer,
    encode, interface,
    manifest::{self, Item},
    message,
};
use crate::{
    bail,
    error::{self, Context, Error, Result},
    graph::{Checked, Severity, build::spell_constants},
    mil::{Arg, Data, Program, Weight},
    ops::Opset,
};

#[derive(Clone, Copy, Default)]
pub struct Save<'a> {
    /// Replaces what is there.
    pub force: bool,
    /// The package that is being rewritten: it must be rewritable and somewhere else, and the items of
    /// its manifest that are neither model nor weights are taken along.
    pub from: Option<&'a Package>,
    /// User-defined metadata that is known only once the weights are written.
    pub late: Option<&'a dyn Fn() -> BTreeMap<String, String>>,
}

/// What was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    pub path: PathBuf,
    pub spec_version: i32,
    pub model_bytes: u64,
    pub weight_bytes: u64,
}

/// Writes a program and its interface as a package. On failure nothing is left behind.
pub fn save(path: &Path, program: &Checked, interface: &Interface, options: Save<'_>) -> Result<Saved> {
    let program = program.program();
    check_target(path, options)?;
    let spec_version = spec_version(program)?;
    check_interface(interface, program, spec_version)?;
    let program = &spelt(program);
    let parent = parent(path);
    let beside = tempfile::Builder::new()
        .prefix(".silane-")
        .tempdir_in(parent)
        .map_err(|e| error::io(parent, &e))
        .hint(|| format!("`{}` must be a directory that can be written to", parent.display()))?;
    let mut draft = Draft { dir: beside.path().join("new"), saved: Saved::new(path, spec_version) };
    draft.write(program, interface, options).map_err(|e| out_of_space(e, path, program))?;
    move_into_place(&draft.dir, path, &beside.path().join("old"))?;
    Ok(draft.saved)
}

/// The package before it is moved to its place.
struct Draft {
    dir: PathBuf,
    saved: Saved,
}

impl Saved {
    fn new(path: &Path, spec_version: i32) -> Self {
        Self { path: path.into(), spec_version, model_bytes: 0, weight_bytes: 0 }
    }
}

impl Draft {
    fn write(&mut self, program: &Program, interface: &Interface, options: Save<'_>) -> Result<()> {
        let data = self.dir.join("Data").join(AUTHOR);
        fs::create_dir_all(&data).map_err(|e| disk_error(&data, &e))?;
        let mut manifest = match options.from.and_then(|p| p.manifest.as_ref().map(|m| (p, m))) {
            Some((package, manifest)) => self.take_along(package, manifest)?,
            None => Manifest { root: String::new(), items: Default::default(), other: Default::default() },
        };
        let mut weights: Option<Writer> = None;
        let encoded = encode::program(program, &mut |w: &Weight| {
            let offset = writer(&mut weights, &data)?.add(w)?;
            Ok((format!("@model_path/{WEIGHTS}/{WEIGHT_FILE}"), offset))
        })?;
        if let Some(weights) = weights {
            let (bytes, digest) = weights.finish()?;
            self.saved.weight_bytes = bytes;
            let item = Item::new(&format!("{AUTHOR}/{WEIGHTS}"), WEIGHTS, "CoreML Model Weights");
            manifest.items.insert(manifest::identifier(&digest), item);
        }
        let mut interface = interface.clone();
        if let Some(late) = options.late {
            interface.metadata.user_defined.extend(late());
        }
        let model = message(&interface, encoded, self.saved.spec_version).encode_to_vec();
        if i32::try_from(model.len()).is_err() {
            bail!("the model without its weights takes {} bytes, 2147483647 are possible", model.len());
        }
        self.saved.model_bytes = model.len() as u64;
        write(&data.join(MODEL), &model)?;
        manifest.root = manifest::identifier(&Sha256::digest(&model).into());
        let item = Item::new(&format!("{AUTHOR}/{MODEL}"), MODEL, "CoreML Model Specification");
        manifest.items.insert(manifest.root.clone(), item);
        write(&self.dir.join("Manifest.json"), manifest.text()?.as_bytes())
    }

    /// The manifest with neither model nor weights; the other items' files are copied.
    fn take_along(&self, package: &Package, manifest: &Manifest) -> Result<Manifest> {
        let mut kept = manifest.clone();
        let data = package.path.join("Data");
        let holds_weights = |item: &Item| {
            let path = data.join(&item.path);
            item.path.ends_with(WEIGHTS) || package.weight_files.iter().any(|f| f.path().starts_with(&path))
        };
        kept.items.retain(|id, item| *id != manifest.root && !holds_weights(item));
        for item in kept.items.values() {
            if !super::leads_inside(Path::new(&item.path)) {
                bail!("the manifest's path `{}` leads out of the package", item.path);
            }
            copy(&data.join(&item.path), &self.dir.join("Data").join(&item.path))?;
        }
        Ok(kept)
    }
}

fn writer<'a>(weights: &'a mut Option<Writer>, data: &Path) -> Result<&'a mut Writer> {
    if weights.is_none() {
        let dir = data.join(WEIGHTS);
        fs::create_dir_all(&dir).map_err(|e| disk_error(&dir, &e))?;
        *weights = Some(Writer::create(&dir.join(WEIGHT_FILE))?);
    }
    weights.as_mut().ok_or_else(|| Error::new("no weight file"))
}

fn check_target(path: &Path, options: Save<'_>) -> Result<()> {
    let place = path.display();
    if path.extension().is_none_or(|e| e != "mlpackage") {
        bail!("{place}: ML Programs are written as packages"; hint: "end the name in `.mlpackage`");
    }
    if let Some(from) = options.from {
        from.rewritable()?;
        if let (Some(source), Some(target)) = (real_path(&from.path), real_path(path))
            && (source.starts_with(&target) || target.starts_with(&source))
        {
            bail!("{place} is the package that is being read"; hint: "write to another place");
        }
    }
    if fs::symlink_metadata(path).is_ok() && !options.force {
        bail!("{place} exists already"; hint: "`--force` replaces it");
    }
    Ok(())
}

/// The path without symbolic links; the last part need not exist.
fn real_path(path: &Path) -> Option<PathBuf> {
    let parent = || fs::canonicalize(parent(path)).ok().zip(path.file_name());
    fs::canonicalize(path).ok().or_else(|| parent().map(|(dir, name)| dir.join(name)))
}

fn parent(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The specification version that goes with the newest opset in use.
fn spec_version(program: &Program) -> Result<i32> {
    let mut newest = 0;
    for (name, f) in &program.functions {
        match Opset::from_wire(&f.opset) {
            Some(opset) => newest = newest.max(opset.spec_version()),
            None => bail!("{name}: the opset `{}` is not known", f.opset),
        }
    }
    Ok(newest)
}

fn check_interface(interface: &Interface, program: &Program, spec_version: i32) -> Result<()> {
    let mut broken = interface::problems(interface, program, spec_version);
    broken.retain(|p| p.severity == Severity::Error);
    match broken.as_slice() {
        [] => Ok(()),
        [one] => bail!("{one}"),
        [first, rest @ ..] => bail!("{first}, and {} more problems", rest.len()),
    }
}

/// The program with its constants spelt as ops in functions where an op takes a weight directly, which
/// no Core ML reads.
fn spelt(program: &Program) -> Program {
    let mut program = program.clone();
    for f in program.functions.values_mut() {
        let mut direct = false;
        let weight = |a: &Arg| matches!(a, Arg::Const(c) if matches!(c.data, Data::Weight(_)));
        f.body.walk(&mut |op| direct |= !op.kind.starts_with("constexpr_") && op.args().any(weight));
        if direct {
            spell_constants(f);
        }
    }
    program
}

fn move_into_place(new: &Path, path: &Path, old: &Path) -> Result<()> {
    let moved = fs::symlink_metadata(path).is_ok();
    if moved {
        fs::rename(path, old).map_err(|e| error::io(path, &e))?;
    }
    fs::rename(new, path).map_err(|e| {
        if moved {
            // The error that is reported is the first one.
            drop(fs::rename(old, path));
        }
        error::io(path, &e)
    })
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let failed = |e: std::io::Error| disk_error(from, &e);
    if from.is_dir() {
        fs::create_dir_all(to).map_err(failed)?;
        for entry in fs::read_dir(from).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            copy(&entry.path(), &to.join(entry.file_name()))?;
        }
        return Ok(());
    }
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    fs::copy(from, to).map(drop).map_err(failed)
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    fs::write(path, bytes).map_err(|e| disk_error(path, &e))
}

/// What writing to `path` failed with; a full disk is told apart, and completed by [`out_of_space`].
pub(super) fn disk_error(path: &Path, e: &std::io::Error) -> Error {
    match e.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => Error::new(NO_SPACE),
        _ => error::io(path, e),
    }
}

/// Says how much room is needed, when that was the trouble.
fn out_of_space(e: Error, path: &Path, program: &Program) -> Error {
    if e.message() != NO_SPACE {
        return e;
    }
    let mut needed = BTreeMap::new();
    let mut weigh = |w: &Weight| {
        needed.insert(w.key.clone(), w.dtype.packed_len(w.count()).unwrap_or(0));
        Ok((String::new(), 0))
    };
    let spec = encode::program(program, &mut weigh).map_or(0, |p| p.encoded_len());
    let bytes = needed.values().fold(spec, |sum, n| sum.saturating_add(*n));
    e.at(path.display()).hint(format!("the package needs about {bytes} bytes"))
}

const NO_SPACE: &str = "no space left on the device";
const MODEL: &str = "model.mlmodel";
const WEIGHTS: &str = "weights";
const WEIGHT_FILE: &str = "weight.bin";
