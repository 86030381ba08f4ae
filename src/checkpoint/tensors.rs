//! The tensors of all weight files by name; nothing is read until a weight is asked for its bytes.
//!
//! Where a name ends in `LayerNorm.weight` or `LayerNorm.bias` and is not there, the old names
//! `LayerNorm.gamma` and `LayerNorm.beta` are looked up instead.

use std::{collections::BTreeMap, fmt, ops::Range, path::Path, sync::Arc};

use memmap2::Mmap;

use super::{
    Config,
    quantized::{fp8_block, refuse_packed},
    safetensors,
    weights::WeightFiles,
};
use crate::{
    bail,
    error::{Error, Result},
    mil::{Bytes, DType, Weight},
};

#[derive(Debug, Clone)]
pub struct Tensors {
    entries: BTreeMap<String, Info>,
    /// What is read in the place of tensors of the files, and what they do not have.
    replaced: BTreeMap<String, Weight>,
    fp8_block: [usize; 2],
}

#[derive(Clone)]
pub struct Info {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub file: Arc<Path>,
    map: Arc<Mmap>,
    range: Range<usize>,
}

impl Tensors {
    pub(super) fn open(files: &WeightFiles, config: &Config, notes: &mut Vec<String>) -> Result<Tensors> {
        let mut tensors =
            Tensors { entries: BTreeMap::new(), replaced: BTreeMap::new(), fp8_block: fp8_block(config) };
        for file in &files.files {
            tensors.add_file(file, files.index.as_ref())?;
        }
        if let Some(index) = &files.index {
            tensors.check_index(index, notes)?;
        }
        refuse_packed(config, &tensors)?;
        tensors.check_fp8()?;
        Ok(tensors)
    }

    /// All names, sorted, as the files have them.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(String::as_str)
    }

    pub fn contains(&self, name: &str) -> bool {
        self.replaced.contains_key(name) || self.find(name).is_some()
    }

    pub fn get(&self, name: &str) -> Option<&Info> {
        self.find(name).map(|(_, info)| info)
    }

    pub fn shape(&self, name: &str) -> Result<&[usize]> {
        if let Some(weight) = self.replaced.get(name) {
            return Ok(&weight.shape);
        }
        self.find(name).map(|(_, info)| info.shape.as_slice()).ok_or_else(|| self.missing(name))
    }

    /// Has another weight read in the place of a tensor, or one that the files do not have.
    pub fn replace(&mut self, name: &str, weight: Weight) {
        self.replaced.insert(name.into(), weight);
    }

    /// The tensor as it is stored; 8-bit floats with block scales come out as fp32.
    pub fn weight(&self, name: &str) -> Result<Weight> {
        if let Some(weight) = self.replaced.get(name) {
            return Ok(weight.clone());
        }
        let (name, info) = self.find(name).ok_or_else(|| self.missing(name))?;
        let native = info.weight(name);
        match self.entries.get(&format!("{name}_scale_inv")) {
            Some(scale) if is_fp8(info.dtype) => Ok(self.scaled(name, info, scale, &native)),
            _ => Ok(native),
        }
    }

    /// The elements of a float tensor, in 32 bits.
    pub fn floats(&self, name: &str) -> Result<Vec<f32>> {
        self.float_weight(name)?.floats()
    }

    /// The error for a tensor that is not there, with the names that are nearest.
    pub fn missing(&self, name: &str) -> Error {
        let error = Error::new(format!("the checkpoint has no tensor `{name}`"));
        let near: Vec<String> = self.nearest(name).iter().map(|n| format!("`{n}`")).collect();
        if near.is_empty() { error } else { error.hint(format!("the nearest names are {}", near.join(", "))) }
    }

    /// The tensor as it is stored, which must be of floats: integers in the place of a weight are packed or
    /// need a scale, and their values alone would be wrong.
    pub fn float_weight(&self, name: &str) -> Result<Weight> {
        let weight = self.weight(name)?;
        if !weight.dtype.is_float() {
            bail!(
                "tensor `{name}`: {} in the place of floats, it is probably quantized", weight.ty();
                hint: "convert the original checkpoint, and quantize it here"
            );
        }
        Ok(weight)
    }

    fn find(&self, name: &str) -> Option<(&str, &Info)> {
        let found = |name: &str| self.entries.get_key_value(name).map(|(k, v)| (k.as_str(), v));
        found(name).or_else(|| {
            let old = [("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta")];
            let (stem, old) = old.iter().find_map(|(new, old)| Some((name.strip_suffix(new)?, old)))?;
            found(&format!("{stem}{old}"))
        })
    }

    fn nearest(&self, name: &str) -> Vec<&str> {
        let mut near: Vec<(usize, &str)> = self.names().map(|n| (distance(name, n), n)).collect();
        near.sort_unstable();
        near.into_iter().take(3).filter(|(d, _)| *d <= name.len() / 2).map(|(_, n)| n).collect()
    }

    fn add_file(&mut self, path: &Path, index: Option<&BTreeMap<String, String>>) -> Result<()> {
        let file: Arc<Path> = path.into();
        let mapped = safetensors::open(path)?;
        for (name, entry) in mapped.entries {
            let info = Info {
                dtype: entry.dtype,
                shape: entry.shape,
                file: Arc::clone(&file),
                map: Arc::clone(&mapped.map),
                range: entry.range,
            };
            match self.entries.get(&name) {
                Some(other) if !other.same_as(&info) => bail!(
                    "tensor `{name}` is in {} and in {}, with different contents",
                    other.file.display(), info.file.display();
                    hint: "one of the files is from another version of the model; fetch them again"
                ),
                Some(_) if index.and_then(|i| i.get(&name)) != Some(&info.file_name()) => {}
                _ => {
                    self.entries.insert(name, info);
                }
            }
        }
        Ok(())
    }

    fn check_index(&self, index: &BTreeMap<String, String>, notes: &mut Vec<String>) -> Result<()> {
        for (name, file) in index {
            let seen = self.entries.get(name).map(|info| info.file_name());
            match seen {
                Some(seen) if seen == *file => {}
                Some(seen) => bail!(
                    "the index says that tensor `{name}` is in `{file}`, and it is in `{seen}`";
                    hint: "the index is from another version of the model; fetch the files again"
                ),
                None => bail!(
                    "the index says that tensor `{name}` is in `{file}`, and it is not there";
                    hint: "the download is not complete; fetch the files again"
                ),
            }
        }
        let unlisted: Vec<&str> = self.names().filter(|n| !index.contains_key(*n)).collect();
        if let Some(first) = unlisted.first() {
            notes.push(format!(
                "{} tensors are used that the index does not list, such as `{first}`",
                unlisted.len()
            ));
        }
        Ok(())
    }

    fn check_fp8(&self) -> Result<()> {
        for (name, info) in self.entries.iter().filter(|(_, info)| is_fp8(info.dtype)) {
            let place = format!("tensor `{name}`: {}", info.dtype);
            let Some(scale) = self.entries.get(&format!("{name}_scale_inv")) else {
                bail!("{place} without `{name}_scale_inv` cannot be converted"; hint: "convert the 16-bit checkpoint");
            };
            let [rows, columns] = info.shape.as_slice() else {
                bail!("{place} has shape {:?}, block scales need a matrix", info.shape);
            };
            let want = [rows.div_ceil(self.fp8_block[0]), columns.div_ceil(self.fp8_block[1])];
            if scale.shape != want {
                bail!("{place} {:?} has scales {:?}, expected {want:?}", info.shape, scale.shape);
            }
        }
        Ok(())
    }

    fn scaled(&self, name: &str, info: &Info, scale: &Info, native: &Weight) -> Weight {
        let ([height, width], columns) = (self.fp8_block, info.shape.last().copied().unwrap_or(1));
        let scale = scale.weight(&format!("{name}_scale_inv"));
        native.map("scale_inv", DType::F32, info.shape.clone(), move |mut values| {
            let (scales, across) = (scale.floats()?, columns.div_ceil(width));
            for (i, value) in values.iter_mut().enumerate() {
                let (row, column) = (i / columns, i % columns);
                *value *= scales[row / height * across + column / width];
            }
            Ok(values)
        })
    }
}

impl Info {
    fn weight(&self, name: &str) -> Weight {
        let (map, range) = (Arc::clone(&self.map), self.range.clone());
        Weight::new(format!("ckpt:{name}"), self.dtype, self.shape.clone(), move || {
            Ok(Bytes::mapped(Arc::clone(&map), range.clone()))
        })
    }

    fn file_name(&self) -> String {
        self.file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
    }

    fn same_as(&self, other: &Info) -> bool {
        self.dtype == other.dtype && self.shape == other.shape && self.bytes() == other.bytes()
    }

    fn bytes(&self) -> &[u8] {
        self.map.get(self.range.clone()).unwrap_or(&[])
    }
}

impl fmt::Debug for Info {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {:?} in {}", self.dtype, self.shape, self.file.display())
    }
}

fn is_fp8(dtype: DType) -> bool {
    matches!(dtype, DType::F8E4M3 | DType::F8E5M2)
}

/// How many letters are to be inserted, left out or replaced to get from one name to the other.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}
