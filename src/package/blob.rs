//! Weight files, storage version 2: a head of 64 bytes, then records of a 64-byte head and packed data.
//!
//! Every number of a file is checked against its real length before it is used.

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    io::{BufWriter, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

use memmap2::Mmap;
use sha2::{Digest, Sha256};

use super::save::disk_error;
use crate::{
    bail,
    error::{self, Error, Result},
    mil::{Bytes, DType, Weight},
};

const ALIGN: u64 = 64;
const VERSION: u32 = 2;
const SENTINEL: u32 = 0xDEAD_BEEF;

/// One weight file of a package, opened when its first weight is read.
#[derive(Debug)]
pub struct WeightFile {
    name: String,
    path: PathBuf,
    reader: OnceLock<Result<Reader>>,
}

/// The weight files that a model refers to, by the name it uses.
#[derive(Debug)]
pub(super) struct WeightFiles {
    dir: PathBuf,
    files: BTreeMap<String, Arc<WeightFile>>,
}

/// A mapped weight file.
#[derive(Debug, Clone)]
pub struct Reader {
    path: PathBuf,
    map: Arc<Mmap>,
}

/// Where one weight lies in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// Of the record's head; what a program refers to.
    pub offset: u64,
    /// The type's code in the file.
    pub code: u32,
    pub data: u64,
    pub len: u64,
    /// Unused bits of the last byte, for types narrower than one.
    pub padding: u64,
}

/// Writes a weight file from front to back; equal weights are stored once.
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: BufWriter<File>,
    end: u64,
    count: u32,
    by_key: HashMap<(String, DType, usize), u64>,
    by_content: HashMap<([u8; 32], DType, usize), u64>,
    digest: Sha256,
}

impl WeightFile {
    fn new(dir: &Path, name: &str) -> Self {
        let path = dir.join(name.strip_prefix("@model_path/").unwrap_or(name));
        Self { name: name.into(), path, reader: OnceLock::new() }
    }

    /// The name that the program uses, e.g. `@model_path/weights/weight.bin`.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The open file, or why it cannot be read.
    pub fn reader(&self) -> Result<&Reader> {
        self.reader.get_or_init(|| self.open()).as_ref().map_err(Clone::clone)
    }

    fn open(&self) -> Result<Reader> {
        let inside = self.name.strip_prefix("@model_path/").unwrap_or(&self.name);
        if !super::leads_inside(Path::new(inside)) {
            bail!("weight file `{}`: the path leads out of the package", self.name);
        }
        Reader::open(&self.path)
    }

    fn bytes(&self, offset: u64, dtype: DType, count: usize) -> Result<Bytes> {
        let reader = self.reader()?;
        let record = reader.record(offset)?;
        if record.dtype() != Some(dtype) {
            bail!(
                "{}: the record at {offset} holds {}, the program says {dtype}",
                reader.path.display(),
                record.type_name()
            );
        }
        let want = dtype.packed_len(count).unwrap_or(usize::MAX);
        if record.len != want as u64 {
            bail!(
                "{}: the record at {offset} has {} bytes, {count} elements of {dtype} take {want}",
                reader.path.display(),
                record.len
            );
        }
        Ok(reader.bytes(&record))
    }
}

impl WeightFiles {
    /// Names are resolved from the directory of the model.
    pub(super) fn new(dir: &Path) -> Self {
        Self { dir: dir.into(), files: BTreeMap::new() }
    }

    /// A promise of the weight at `offset`.
    pub(super) fn weight(&mut self, name: &str, offset: u64, dtype: DType, shape: Vec<usize>) -> Weight {
        let dir = &self.dir;
        let file =
            self.files.entry(name.into()).or_insert_with(|| Arc::new(WeightFile::new(dir, name))).clone();
        let count = shape.iter().fold(1usize, |n, d| n.saturating_mul(*d));
        Weight::new(format!("{name}:{offset}"), dtype, shape, move || file.bytes(offset, dtype, count))
    }

    pub(super) fn into_files(self) -> Vec<Arc<WeightFile>> {
        self.files.into_values().collect()
    }
}

impl Reader {
    pub fn open(path: &Path) -> Result<Self> {
        let file = match File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
                bail!("weight file {} is missing", path.display(); hint: "the graph can still be inspected; fetch the package again with its weights")
            }
            Err(e) => return Err(error::io(path, &e)),
        };
        #[expect(
            unsafe_code,
            reason = "mapping: the file must not be cut while it is open, as for any mapped file"
        )]
        let map = unsafe { Mmap::map(&file) }.map_err(|e| error::io(path, &e))?;
        let reader = Self { path: path.into(), map: Arc::new(map) };
        reader.check_head()?;
        Ok(reader)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes in the whole file.
    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// The record whose head is at `offset`.
    pub fn record(&self, offset: u64) -> Result<Record> {
        let place = || format!("{}: the record at {offset}", self.path.display());
        if self.u32(offset) != Some(SENTINEL) {
            return Err(Error::new("no weight begins there").at(place()));
        }
        let field = |at: u64| offset.checked_add(at).and_then(|at| self.u64(at));
        let (Some(code), Some(len), Some(data), Some(padding)) =
            (self.u32(offset.saturating_add(4)), field(8), field(16), field(24))
        else {
            return Err(Error::new("the file ends inside its head").at(place()));
        };
        if data.checked_add(len).is_none_or(|end| end > self.len()) {
            return Err(
                Error::new(format!("{len} bytes at {data} go past the end, {}", self.len())).at(place())
            );
        }
        let mut record = Record { offset, code, data, len, padding: 0 };
        if let Some(bits @ 1..8) = record.dtype().and_then(DType::bits) {
            // Types of whole bytes have no padding, and early writers left other numbers there.
            record.padding = padding;
            if padding > 7 || padding > len || (len * 8 - padding) % bits as u64 != 0 {
                let message =
                    format!("{len} bytes less {padding} bits are no whole number of {}", record.type_name());
                return Err(Error::new(message).at(place()));
            }
        }
        Ok(record)
    }

    /// The packed bytes of a record.
    pub fn bytes(&self, record: &Record) -> Bytes {
        let at = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
        Bytes::mapped(self.map.clone(), at(record.data)..at(record.data + record.len))
    }

    /// Every record in order of the file; ends at the first that is broken.
    pub fn records(&self) -> impl Iterator<Item = Result<Record>> {
        let mut left = self.u32(0).unwrap_or(0);
        let mut next = ALIGN;
        std::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let record = self.record(next);
            match &record {
                Ok(r) if r.data > r.offset => next = (r.data + r.len).next_multiple_of(ALIGN),
                _ => left = 0,
            }
            Some(record)
        })
    }

    fn check_head(&self) -> Result<()> {
        let path = self.path.display();
        if self.map.starts_with(super::LFS_POINTER) {
            bail!("{path} is a Git LFS pointer, not the weights"; hint: "run `git lfs pull` where it was cloned; the graph can still be inspected");
        }
        match self.u32(4) {
            Some(VERSION) if self.len() >= ALIGN => Ok(()),
            Some(other) if self.len() >= ALIGN => {
                bail!("{path}: weight storage has version {other}, {VERSION} is expected")
            }
            _ => bail!("{path} has {} bytes, a weight file has at least {ALIGN}", self.len()),
        }
    }

    fn u32(&self, at: u64) -> Option<u32> {
        let bytes = self.map.get(usize::try_from(at).ok()?..)?.first_chunk()?;
        Some(u32::from_le_bytes(*bytes))
    }

    fn u64(&self, at: u64) -> Option<u64> {
        let bytes = self.map.get(usize::try_from(at).ok()?..)?.first_chunk()?;
        Some(u64::from_le_bytes(*bytes))
    }
}

impl Record {
    pub fn dtype(&self) -> Option<DType> {
        CODES.iter().find(|(_, code)| *code == self.code).map(|(dtype, _)| *dtype)
    }

    fn type_name(&self) -> String {
        self.dtype().map_or_else(|| format!("the unknown type {}", self.code), |d| d.to_string())
    }
}

impl Writer {
    pub fn create(path: &Path) -> Result<Self> {
        let file = File::create_new(path).map_err(|e| disk_error(path, &e))?;
        let mut writer = Self {
            path: path.into(),
            file: BufWriter::new(file),
            end: 0,
            count: 0,
            by_key: HashMap::new(),
            by_content: HashMap::new(),
            digest: Sha256::new(),
        };
        writer.write(&head(0))?;
        Ok(writer)
    }

    /// Stores a weight, unless it is there already, and returns the offset to refer to it by.
    pub fn add(&mut self, weight: &Weight) -> Result<u64> {
        let Some((_, code)) = CODES.iter().find(|(dtype, _)| *dtype == weight.dtype) else {
            bail!("weight `{}`: {} has no place in a weight file", weight.key, weight.dtype);
        };
        let key = (weight.key.clone(), weight.dtype, weight.count());
        if let Some(offset) = self.by_key.get(&key) {
            return Ok(*offset);
        }
        let bytes = weight.bytes()?;
        let content: ([u8; 32], _, _) = (Sha256::digest(&*bytes).into(), weight.dtype, bytes.len());
        let offset = match self.by_content.get(&content) {
            Some(offset) => *offset,
            None => {
                self.digest.update(content.0);
                self.append(*code, padding(weight), &bytes)?
            }
        };
        self.by_key.insert(key, offset);
        self.by_content.insert(content, offset);
        Ok(offset)
    }

    /// Completes the file; returns its length, and a digest of what it holds.
    pub fn finish(mut self) -> Result<(u64, [u8; 32])> {
        self.file.seek(SeekFrom::Start(0)).map_err(|e| disk_error(&self.path, &e))?;
        let end = self.end;
        self.write(&head(self.count))?;
        self.file.flush().map_err(|e| disk_error(&self.path, &e))?;
        Ok((end, self.digest.finalize().into()))
    }

    fn append(&mut self, code: u32, padding: u64, bytes: &[u8]) -> Result<u64> {
        let gap = self.end.next_multiple_of(ALIGN) - self.end;
        self.write(&[0; ALIGN as usize][..gap as usize])?;
        let offset = self.end;
        let mut head = [0; ALIGN as usize];
        head[..4].copy_from_slice(&SENTINEL.to_le_bytes());
        head[4..8].copy_from_slice(&code.to_le_bytes());
        head[8..16].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
        head[16..24].copy_from_slice(&(offset + ALIGN).to_le_bytes());
        head[24..32].copy_from_slice(&padding.to_le_bytes());
        self.write(&head)?;
        self.write(bytes)?;
        self.count += 1;
        Ok(offset)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(|e| disk_error(&self.path, &e))?;
        self.end += bytes.len() as u64;
        Ok(())
    }
}

fn head(count: u32) -> [u8; ALIGN as usize] {
    let mut head = [0; ALIGN as usize];
    head[..4].copy_from_slice(&count.to_le_bytes());
    head[4..8].copy_from_slice(&VERSION.to_le_bytes());
    head
}

fn padding(weight: &Weight) -> u64 {
    let bits = weight.dtype.bits().unwrap_or(8) as u64;
    (8 - weight.count() as u64 % 8 * bits % 8) % 8
}

const CODES: [(DType, u32); 17] = [
    (DType::F16, 1),
    (DType::F32, 2),
    (DType::U8, 3),
    (DType::I8, 4),
    (DType::BF16, 5),
    (DType::I16, 6),
    (DType::U16, 7),
    (DType::I4, 8),
    (DType::U1, 9),
    (DType::U2, 10),
    (DType::U4, 11),
    (DType::U3, 12),
    (DType::U6, 13),
    (DType::I32, 14),
    (DType::U32, 15),
    (DType::F8E4M3, 16),
    (DType::F8E5M2, 17),
];
