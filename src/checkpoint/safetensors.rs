//! One mapped safetensors file: the header is checked against the file before anything is believed.

use std::{collections::BTreeMap, fs::File, ops::Range, path::Path, sync::Arc};

use memmap2::Mmap;
use serde::Deserialize;

use crate::{
    bail,
    error::{Context, Error, Result, io},
    mil::DType,
};

/// A mapped file and where its tensors are.
pub(super) struct Mapped {
    pub(super) map: Arc<Mmap>,
    pub(super) entries: BTreeMap<String, Entry>,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) range: Range<usize>,
}

/// The format's own limit.
const MAX_HEADER: usize = 100_000_000;

pub(super) fn open(path: &Path) -> Result<Mapped> {
    let map = map(path)?;
    let entries = entries(&map).at(path.display())?;
    Ok(Mapped { map: Arc::new(map), entries })
}

/// The size of the file that a Git LFS pointer stands for.
pub(super) fn lfs_pointer(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes.get(..bytes.len().min(512))?).ok()?;
    text.starts_with("version https://git-lfs").then_some(())?;
    text.lines().find_map(|line| line.strip_prefix("size ")).or(Some("an unknown number of"))
}

fn map(path: &Path) -> Result<Mmap> {
    let file = File::open(path).map_err(|e| io(path, &e))?;
    #[expect(unsafe_code, reason = "mapping is unsafe because others may change the file; we only read")]
    let map = unsafe { Mmap::map(&file) };
    map.map_err(|e| io(path, &e))
}

fn entries(file: &[u8]) -> Result<BTreeMap<String, Entry>> {
    let (header, start) = header(file)?;
    let raw: BTreeMap<String, serde_json::Value> = serde_json::from_slice(header)
        .map_err(|e| Error::new(format!("the header of {} bytes is not valid JSON: {e}", header.len())))?;
    let mut entries = BTreeMap::new();
    for (name, value) in raw {
        if name != "__metadata__" {
            entries.insert(name.clone(), entry(value, start).at(format!("tensor `{name}`"))?);
        }
    }
    check_ranges(&entries, start, file.len())?;
    Ok(entries)
}

/// The header's bytes and where the data starts.
fn header(file: &[u8]) -> Result<(&[u8], usize)> {
    const FETCH: &str = "fetch the file again";
    if let Some(size) = lfs_pointer(file) {
        bail!(
            "this is a Git LFS pointer of {} bytes, not the {size} bytes it stands for", file.len();
            hint: "fetch the files with `git lfs pull`, or `hf download`"
        );
    }
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        bail!("truncated: {} bytes, even an empty file has 10", file.len(); hint: "{FETCH}");
    };
    let length = u64::from_le_bytes(*length);
    // A length beyond the limit is another format; within it, the file was cut.
    match usize::try_from(length).ok().filter(|n| *n <= MAX_HEADER) {
        None => bail!("not a safetensors file: a header of {length} bytes, at most {MAX_HEADER} are allowed"),
        Some(n) => match rest.get(..n) {
            Some(header) => Ok((header, n + 8)),
            None => bail!(
                "truncated: the header alone takes {} bytes, the file has {}", n + 8, file.len();
                hint: "{FETCH}"
            ),
        },
    }
}

#[derive(Deserialize)]
struct Raw {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

fn entry(value: serde_json::Value, start: usize) -> Result<Entry> {
    let raw: Raw = serde_json::from_value(value).map_err(|e| Error::new(format!("bad header entry: {e}")))?;
    let dtype = dtype(&raw.dtype)?;
    let size = |n: u64| usize::try_from(n).ok();
    let shape: Option<Vec<usize>> = raw.shape.iter().map(|n| size(*n)).collect();
    let count = shape.as_ref().and_then(|s| s.iter().try_fold(1usize, |n, d| n.checked_mul(*d)));
    let bytes = count.and_then(|n| dtype.packed_len(n));
    let (Some(shape), Some(bytes)) = (shape, bytes) else {
        bail!("shape {:?} is too large", raw.shape);
    };
    let (begin, end) = raw.data_offsets;
    let at = |n: u64| size(n).and_then(|n| n.checked_add(start));
    match (at(begin), at(end)) {
        (Some(a), Some(b)) if b.checked_sub(a) == Some(bytes) => Ok(Entry { dtype, shape, range: a..b }),
        _ => bail!("{dtype} {shape:?} takes {bytes} bytes, its data offsets are {begin} to {end}"),
    }
}

/// The data must be covered without holes or overlaps, to the last byte of the file.
fn check_ranges(entries: &BTreeMap<String, Entry>, start: usize, length: usize) -> Result<()> {
    let end = entries.values().map(|e| e.range.end).max().unwrap_or(start);
    if end > length {
        bail!("truncated: the header describes {end} bytes, the file has {length}"; hint: "fetch the file again");
    }
    if end < length {
        bail!("the header describes {end} bytes, the file has {length}");
    }
    let mut ranges: Vec<_> = entries.iter().map(|(name, e)| (e.range.start, e.range.end, name)).collect();
    ranges.sort_unstable();
    let mut at = start;
    for (begin, end, name) in ranges {
        if begin != at {
            let what = if begin < at { "overlaps the tensor before it" } else { "leaves a hole before it" };
            bail!("tensor `{name}`: its data {what}: it begins at byte {begin}, expected {at}");
        }
        at = end;
    }
    Ok(())
}

fn dtype(name: &str) -> Result<DType> {
    Ok(match name {
        "F64" => DType::F64,
        "F32" => DType::F32,
        "F16" => DType::F16,
        "BF16" => DType::BF16,
        "F8_E4M3" => DType::F8E4M3,
        "F8_E5M2" => DType::F8E5M2,
        "I8" => DType::I8,
        "U8" => DType::U8,
        "I16" => DType::I16,
        "U16" => DType::U16,
        "I32" => DType::I32,
        "U32" => DType::U32,
        "I64" => DType::I64,
        "U64" => DType::U64,
        "BOOL" => DType::Bool,
        other => bail!("dtype `{other}` is not supported"),
    })
}
