//! The outside format: packages on disk, read and written.
//!
//! What is read is carried one to one, or the package is marked as not to be rewritten; weights stay in
//! their files until they are needed, so a package without them opens all the same.

pub mod blob;
mod compiled;
mod decode;
mod encode;
mod foreign;
pub mod interface;
mod kinds;
pub mod manifest;
mod proto;
mod save;
mod wire;

use std::{
    fs,
    path::{Component, Path, PathBuf},
    sync::Arc,
};

pub use blob::WeightFile;
pub use foreign::{Foreign, op_counts};
pub use interface::Interface;
pub use manifest::Manifest;
use prost::Message;
pub use save::{Save, Saved, save};

use self::{blob::WeightFiles, proto::coreml as pb, wire::Sum};
use crate::{
    bail,
    error::{self, Context, Error, Result},
    mil::Program,
};

/// What was found at a path.
#[derive(Debug)]
pub enum Opened {
    Program(Box<Package>),
    Other(Box<Foreign>),
}

/// A model that is one ML Program.
#[derive(Debug)]
pub struct Package {
    pub program: Program,
    pub interface: Interface,
    pub spec_version: i32,
    /// As it was given.
    pub path: PathBuf,
    /// The file that holds the model.
    pub model: PathBuf,
    /// A bare `.mlmodel` has none.
    pub manifest: Option<Manifest>,
    pub weight_files: Vec<Arc<WeightFile>>,
    loss: Option<String>,
}

/// Opens whatever is at `path`; a bare model file, too.
pub fn open(path: &Path) -> Result<Opened> {
    let meta = fs::metadata(path).map_err(|e| error::io(path, &e))?;
    if meta.is_file() {
        return read(path, path, None);
    }
    if path.join("Manifest.json").exists() {
        let (manifest, model) = locate(path)?;
        return read(path, &model, Some(manifest));
    }
    if path.join("model.mil").exists() || path.join("coremldata.bin").exists() {
        return Ok(Opened::Other(Box::new(compiled::read(path)?)));
    }
    let place = path.display();
    match fs::read_dir(path).map_err(|e| error::io(path, &e))?.next() {
        None => bail!("{place} is an empty directory"),
        Some(_) => {
            bail!("{place} has no `Manifest.json`"; hint: "a package is a directory with `Manifest.json` and `Data` in it")
        }
    }
}

/// Opens a package or model file that must hold an ML Program.
pub fn open_program(path: &Path) -> Result<Package> {
    match open(path)? {
        Opened::Program(package) => Ok(*package),
        Opened::Other(other) => Err(other.refusal().at(path.display())),
    }
}

impl Package {
    /// Whether writing this package again would keep everything that is in it.
    pub fn rewritable(&self) -> Result<()> {
        match &self.loss {
            None => Ok(()),
            Some(loss) => {
                bail!("{}: {loss}; a rewritten package would lose that", self.model.display(); hint: "it can be inspected, validated and run")
            }
        }
    }
}

/// The manifest of a package and the path of its model.
fn locate(path: &Path) -> Result<(Manifest, PathBuf)> {
    let file = path.join("Manifest.json");
    let text = fs::read(&file).map_err(|e| error::io(&file, &e))?;
    let manifest = Manifest::parse(&text).at(file.display())?;
    let Some(item) = manifest.items.get(&manifest.root) else {
        bail!("{}: the root model `{}` is not among its items", file.display(), manifest.root);
    };
    let inside = Path::new(&item.path);
    if !leads_inside(inside) {
        bail!("{}: the path `{}` leads out of the package", file.display(), item.path);
    }
    let model = path.join("Data").join(inside);
    Ok((manifest, model))
}

fn read(path: &Path, model: &Path, manifest: Option<Manifest>) -> Result<Opened> {
    let bytes = match fs::read(model) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            bail!("{}: the model file is missing", model.display(); hint: "fetch the package again")
        }
        Err(e) => return Err(error::io(model, &e)),
    };
    recognise(&bytes).at(model.display())?;
    let dir = model.parent().unwrap_or(Path::new("."));
    let foreign = || foreign::read(&bytes, dir).at(model.display());
    if kinds::of(&bytes).at(model.display())? != Some(kinds::PROGRAM) {
        return Ok(Opened::Other(Box::new(foreign()?)));
    }
    let (contents, loss) = program(&bytes, dir).at(model.display())?;
    Ok(Opened::Program(Box::new(Package {
        program: contents.program,
        interface: contents.interface,
        spec_version: contents.spec_version,
        path: path.into(),
        model: model.into(),
        manifest,
        weight_files: contents.weights.into_files(),
        loss,
    })))
}

/// What a model file with an ML Program holds.
struct Contents {
    program: Program,
    interface: Interface,
    spec_version: i32,
    weights: WeightFiles,
}

/// Decodes an ML Program, and says what a rewritten file would lose.
fn program(bytes: &[u8], dir: &Path) -> Result<(Contents, Option<String>)> {
    let mut model = pb::Model::decode(bytes).map_err(undecodable)?;
    if let Some(d) = &mut model.description {
        d.metadata.take_if(|m| *m == pb::Metadata::default());
    }
    let known = model.encode_to_vec();
    let mut weights = WeightFiles::new(dir);
    let description = model.description.unwrap_or_default();
    let interface = interface::decode(description, model.is_updatable);
    let mut program = decode::program(model.ml_program.unwrap_or_default(), &mut weights)?;
    program.default_function.clone_from(&interface.default_function);
    let contents = Contents { program, interface, spec_version: model.specification_version, weights };
    let loss = loss(bytes, &known, &contents.encode()?);
    Ok((contents, loss))
}

/// What is lost between a file, what protobuf understood of it, and what we made of that.
fn loss(file: &[u8], understood: &[u8], ours: &[u8]) -> Option<String> {
    match (Sum::of(file), Sum::of(understood)) {
        (Err(e), _) | (_, Err(e)) => Some(e.message().into()),
        (Ok(a), Ok(b)) if a != b => Some("it says something twice, or in an odd encoding".into()),
        _ if understood != ours => Some("it holds something in a form that is not kept".into()),
        _ => None,
    }
}

impl Contents {
    fn encode(&self) -> Result<Vec<u8>> {
        let mut same = |w: &crate::mil::Weight| match w.key.rsplit_once(':') {
            Some((file, offset)) => Ok((file.to_string(), offset.parse().unwrap_or(0))),
            None => Ok((w.key.clone(), 0)),
        };
        let program = encode::program(&self.program, &mut same)?;
        Ok(message(&self.interface, program, self.spec_version).encode_to_vec())
    }
}

fn message(interface: &Interface, program: pb::mil::Program, spec_version: i32) -> pb::Model {
    pb::Model {
        specification_version: spec_version,
        description: Some(interface::encode(interface)),
        is_updatable: interface.updatable,
        ml_program: Some(program),
    }
}

/// Files that are no model, each with its own message.
fn recognise(bytes: &[u8]) -> Result<()> {
    let head = &bytes[..bytes.len().min(4096)];
    let text = |b: &u8| b.is_ascii_graphic() || b.is_ascii_whitespace() || *b >= 0x80;
    if bytes.is_empty() {
        bail!("the file is empty");
    }
    if head.starts_with(LFS_POINTER) {
        bail!("a Git LFS pointer, not the model"; hint: "run `git lfs pull` where it was cloned");
    }
    if head.starts_with(b"PK\x03\x04") {
        bail!("a zip archive"; hint: "unpack it and open the package inside");
    }
    if head.iter().all(text) {
        bail!("a text file, not a model"; hint: "MIL text is not read; open the package that it came from");
    }
    Ok(())
}

/// Whether a relative path stays below where it begins.
fn leads_inside(path: &Path) -> bool {
    path.components().all(|c| matches!(c, Component::Normal(_) | Component::CurDir))
}

fn undecodable(e: impl std::fmt::Display) -> Error {
    Error::new(format!("not a Core ML model: {e}"))
        .hint("it is damaged, cut short, written by a pre-release of Core ML, or of another format")
}

const LFS_POINTER: &[u8] = b"version https://git-lfs";
const AUTHOR: &str = "com.apple.CoreML";
