//! Damaged packages: an error or a model that is read as it is, never a panic, never memory on a head's word.

use std::fs;

use silane::package::{Opened, blob, open};

use super::{copy_of, fixture, weight_bin, weights};

/// A small generator, so that every run damages the same places.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % n.max(1)
    }

    fn damage(&mut self, bytes: &mut Vec<u8>) {
        let at = self.below(bytes.len());
        let len = self.below(64).min(bytes.len() - at);
        match self.below(6) {
            0 => bytes[at] ^= 1 << self.below(8),
            1 => bytes.truncate(at),
            2 => bytes.splice(at..at, bytes[at..at + len].to_vec()).for_each(drop),
            3 => bytes.drain(at..at + len).for_each(drop),
            4 => bytes[at..at + len].fill(0xff),
            _ => {
                let big = [0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f];
                let end = (at + big.len()).min(bytes.len());
                bytes[at..end].copy_from_slice(&big[..end - at]);
            }
        }
    }
}

#[test]
fn damaged_packages_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let mut dice = Dice(0x5eed_0f5e_ed0f_5eed);
    let (mut refused, mut taken) = (0, 0);
    for name in ["conv_ios16", "lut6_ios18", "multifunction_state_ios18", "joint_sparse_ios18"] {
        let path = copy_of(name, dir.path());
        for file in [
            "Manifest.json",
            "Data/com.apple.CoreML/model.mlmodel",
            "Data/com.apple.CoreML/weights/weight.bin",
        ] {
            let whole = fs::read(path.join(file)).unwrap();
            for _ in 0..150 {
                let mut bytes = whole.clone();
                for _ in 0..=dice.below(3) {
                    dice.damage(&mut bytes);
                }
                fs::write(path.join(file), &bytes).unwrap();
                match open(&path) {
                    Ok(Opened::Program(package)) => {
                        drop(package.rewritable());
                        weights(&package.program).iter().for_each(|w| drop(w.numbers()));
                        for file in &package.weight_files {
                            let _ = file.reader().map(|r| r.records().count());
                        }
                        taken += 1;
                    }
                    Ok(Opened::Other(_)) => taken += 1,
                    Err(_) => refused += 1,
                }
            }
            fs::write(path.join(file), whole).unwrap();
        }
    }
    assert!(refused > 300 && taken > 300, "{refused} refused, {taken} taken");
}

#[test]
fn damaged_models_of_other_kinds_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let mut dice = Dice(0x0dd0_5eed);
    let path = dir.path().join("model.mlmodel");
    for (name, rounds) in [("identity.mlmodel", 500), ("sentiment_pipeline.mlmodel", 30)] {
        let whole = fs::read(fixture(name)).unwrap();
        for _ in 0..rounds {
            let mut bytes = whole.clone();
            dice.damage(&mut bytes);
            fs::write(&path, &bytes).unwrap();
            if let Ok(Opened::Other(other)) = open(&path) {
                assert!(!other.to_string().is_empty());
            }
        }
    }
}

/// Heads of weight records that say what is not so; the field's place, its bytes, and the complaint.
#[test]
fn hostile_weight_records_are_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = copy_of("lut6_ios18", dir.path());
    let whole = fs::read(weight_bin(&path)).unwrap();
    let huge = u64::MAX.to_le_bytes();
    let table: [(usize, &[u8], &str); 10] = [
        (4, &[1], "weight storage has version 1, 2 is expected"),
        (64, &[0], "no weight begins there"),
        (68, &[1], "holds fp16, the program says uint6"),
        (68, &[99], "holds the unknown type 99"),
        (72, &huge, "go past the end"),
        (72, &[35], "no whole number of uint6"),
        (72, &[31], "elements of uint6 take 34"),
        (80, &huge, "go past the end"),
        (80, &[0xff, 0xff], "go past the end"),
        (88, &[8], "no whole number of uint6"),
    ];
    for (at, field, says) in table {
        let mut bytes = whole.clone();
        bytes[at..at + field.len()].copy_from_slice(field);
        fs::write(weight_bin(&path), bytes).unwrap();
        let Opened::Program(package) = open(&path).unwrap() else { panic!() };
        let first = weights(&package.program).into_iter().find(|w| w.key.ends_with(":64")).unwrap();
        let refused = first.bytes().err().unwrap();
        assert!(refused.message().contains(says), "{at}: {refused}");
    }
    for len in [0, 8, 63] {
        fs::write(weight_bin(&path), &whole[..len]).unwrap();
        assert!(blob::Reader::open(&weight_bin(&path)).is_err(), "{len}");
    }
}

/// Messages nested so deep that reading them one in the other would exhaust the stack.
#[test]
fn deep_nesting_is_an_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("deep.mlmodel");
    // A model in a pipeline in a model in a pipeline …
    let mut model = vec![0x08, 0x01];
    for _ in 0..500 {
        let mut pipeline = vec![0x0a];
        length(&mut pipeline, model.len());
        pipeline.append(&mut model);
        model = vec![0x08, 0x01, 0xd2, 0x0c];
        length(&mut model, pipeline.len());
        model.append(&mut pipeline);
    }
    fs::write(&path, model).unwrap();
    let refused = open(&path).err().unwrap();
    assert!(refused.message().contains("more than 8 deep"), "{refused}");
}

fn length(bytes: &mut Vec<u8>, mut n: usize) {
    while n > 0x7f {
        bytes.push(u8::try_from(n & 0x7f).unwrap() | 0x80);
        n >>= 7;
    }
    bytes.push(u8::try_from(n).unwrap());
}
