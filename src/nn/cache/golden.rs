//! The prefill graphs against vectors that numpy computed in 64 bits: `fixtures/attention`.
#![cfg(test)]

use std::{collections::BTreeMap, path::Path};

use candle_core::{DType as Kind, Device, Tensor};

use super::{
    Form, Heads, Kind as LayerKind, Mask, Setup, Steps, Update,
    sparse::{Gather, Scoring, Select, Sparse},
    tiled::{New, Tiled},
};
use crate::{
    checkpoint::Checkpoint,
    graph::{Builder, build::spell_constants, check},
    interp::{Machine, Precision},
    mil::{DType, Function, Program, Type},
    nn::Net,
    ops::{Opset, Val},
};

/// A file: tensors, and the parameters in its metadata.
struct Golden {
    name: String,
    tensors: BTreeMap<String, Tensor>,
    numbers: BTreeMap<String, usize>,
    scoring: String,
}

fn all() -> Vec<Golden> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/attention");
    let mut paths: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths
        .iter()
        .map(|path| {
            let bytes = std::fs::read(path).unwrap();
            let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
            let metadata = header.metadata().clone().unwrap();
            let number = |(k, v): (&String, &String)| Some((k.clone(), v.parse().ok()?));
            Golden {
                name: path.file_stem().unwrap().to_string_lossy().into_owned(),
                tensors: candle_core::safetensors::load_buffer(&bytes, &Device::Cpu)
                    .unwrap()
                    .into_iter()
                    .collect(),
                numbers: metadata.iter().filter_map(number).collect(),
                scoring: metadata.get("scoring").cloned().unwrap_or_default(),
            }
        })
        .collect()
}

impl Golden {
    fn get(&self, name: &str, shape: impl Into<candle_core::Shape>) -> Tensor {
        self.tensors[name].to_dtype(Kind::F32).unwrap().reshape(shape).unwrap().contiguous().unwrap()
    }

    fn heads(&self) -> Heads {
        let (kv, dim) = (self.numbers["kv_heads"], self.numbers["dim"]);
        Heads { query: kv * self.numbers["group"], kv, dim, padded: dim }
    }

    /// Runs the attention of one layer; gives the result and which blocks were chosen.
    fn run(&self, form: Form, update: Update) -> (Vec<f32>, Option<Vec<f32>>) {
        let h = self.heads();
        let (t, pos) = (self.numbers["chunk"], self.numbers["pos"]);
        let slots = 256;
        let block = self.numbers.get("block").copied();
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/models/tiny/llama");
        let checkpoint = Checkpoint::open(folder.to_str().unwrap()).unwrap();
        let mut net = Net::new(&checkpoint, Builder::new(Opset::Ios18), DType::F32, 1, t);
        let n = &mut net;
        let float = |shape: [usize; 4]| Type::tensor(DType::F32, shape);
        let q = n.builder.input("q", float([h.query, h.dim, 1, t])).unwrap();
        let k = n.builder.input("k", float([1, h.kv, t, h.dim])).unwrap();
        let v = n.builder.input("v", float([1, h.kv, t, h.dim])).unwrap();
        let position_ids = n.builder.input("position_ids", Type::tensor(DType::I32, [1, t])).unwrap();
        let setup = Setup {
            heads: h,
            context: slots,
            capacity: slots,
            layers: 1,
            kinds: vec![LayerKind { rope: None, window: None }],
            slopes: None,
            update,
            form,
            first_layer: 0,
            block,
        };
        let mut steps = Steps::new(n, setup, position_ids).unwrap();
        let new = New { q, k, v, cap: None };
        let Mask::Tiles(tiles) = &steps.kinds[0].mask else { panic!("no tiles") };
        let y = match (form, &steps.pooled) {
            (Form::Sparse(sparse, tiled), Some(pooled)) => {
                n.sparse_attention("layer", &steps, (pooled, tiles), (0, 1), (sparse, tiled), new)
            }
            _ => n.tiled_attention("layer", h, &steps.cache, tiles, (0, 1), new),
        };
        let y = n.reshape("out", y.unwrap(), &[h.query, h.dim, 1, t]).unwrap();
        // After the attention, so that it sees the cache and the means as they are stored.
        steps.cache.put(n, "k", 0, k).unwrap();
        steps.cache.put(n, "v", 1, v).unwrap();
        if let Some(pooled) = &mut steps.pooled {
            pooled.put(n, "k", 0, k).unwrap();
            pooled.put(n, "v", 1, v).unwrap();
        }
        steps.finish(n).unwrap();
        let mut function: Function = net.builder.finish(vec![y]);
        spell_constants(&mut function);
        let functions = BTreeMap::from([("main".to_string(), function)]);
        let program = check(Program { functions, default_function: "main".into(), ..Program::default() })
            .unwrap()
            .into_program();

        let mut machine = Machine::new(&program, Precision::Fp32);
        let mut states = machine.states("main").unwrap();
        let both = |k: Tensor, v: Tensor| Tensor::cat(&[k, v], 0).unwrap();
        match block {
            None => {
                let keys = self.get("k_cache", (1, h.kv, slots, h.dim));
                let values = self.tensors["v_cache"]
                    .transpose(1, 3)
                    .unwrap()
                    .reshape((1, h.kv, slots, h.dim))
                    .unwrap();
                states.set("kv_cache", both(keys, values.to_dtype(Kind::F32).unwrap())).unwrap();
            }
            Some(b) => {
                let blocks = slots / b;
                let keys = self.get("k_blocks", (1, h.kv, slots, h.dim));
                let values = self.tensors["v_blocks"].transpose(2, 3).unwrap().contiguous().unwrap();
                states.set("kv_cache", both(keys, values.reshape((1, h.kv, slots, h.dim)).unwrap())).unwrap();
                let keys = self.get("k_mean", (1, h.kv, blocks, h.dim));
                let values = self.tensors["v_mean"]
                    .transpose(1, 3)
                    .unwrap()
                    .reshape((1, h.kv, blocks, h.dim))
                    .unwrap();
                states.set("kv_mean", both(keys, values)).unwrap();
            }
        }
        let q = self.tensors["q"].reshape((h.kv, h.dim, h.group(), t)).unwrap().transpose(1, 2).unwrap();
        let positions = (0..t).map(|i| i64::try_from(pos + i).unwrap()).collect();
        let v = self.tensors["v_new"].transpose(1, 3).unwrap().reshape((1, h.kv, t, h.dim)).unwrap();
        let inputs = BTreeMap::from([
            ("q".to_string(), Val::from(q.contiguous().unwrap().reshape((h.query, h.dim, 1, t)).unwrap())),
            ("k".to_string(), Val::from(self.get("k_new", (1, h.kv, t, h.dim)))),
            ("v".to_string(), Val::from(v)),
            ("position_ids".to_string(), Val::ints(positions, &[1, t]).unwrap()),
        ]);
        let mut chosen = None;
        let mut tap = |_: &crate::mil::Op, name: &str, value: &Val| {
            if name == "layer_chosen" {
                chosen = Some(value.to_floats().unwrap());
            }
        };
        let outputs = machine.run("main", &inputs, &mut states, Some(&mut tap)).unwrap();
        let Some(Val::Tensor(y)) = outputs.into_values().next() else { panic!("no output") };
        let y = y.reshape((h.kv, h.group(), h.dim, t)).unwrap().transpose(1, 2).unwrap();
        (y.contiguous().unwrap().flatten_all().unwrap().to_vec1().unwrap(), chosen)
    }

    /// Relative L2 error against the stored result.
    fn error(&self, seen: &[f32]) -> f64 {
        let expected =
            self.tensors["out"].to_dtype(Kind::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let norm =
            |v: &mut dyn Iterator<Item = f32>| v.map(|x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt();
        norm(&mut seen.iter().zip(&expected).map(|(a, b)| a - b)) / norm(&mut expected.iter().copied())
    }
}

#[test]
fn tiles_meet_the_golden_vectors() {
    let mut count = 0;
    for golden in all().iter().filter(|g| g.name.starts_with("tiled")) {
        count += 1;
        for (group, filled) in [(1, 0), (2, 0), (2, golden.numbers["pos"].min(golden.numbers["past"]))] {
            let (past, tile) = (golden.numbers["past"], golden.numbers["tile"]);
            for update in [Update::Slice, Update::Blend] {
                let (seen, _) = golden.run(Form::Tiled(Tiled { past, tile, filled, group }), update);
                let error = golden.error(&seen);
                assert!(error < 1e-6, "{}, {group} heads at a time: off by {error:.1e}", golden.name);
            }
        }
    }
    assert_eq!(count, 6);
}

#[test]
fn blocks_meet_the_golden_vectors() {
    let mut count = 0;
    for golden in all().iter().filter(|g| g.name.starts_with("sparse")) {
        count += 1;
        for gather in [Gather::Index, Gather::OneHot] {
            let sparse = Sparse {
                block: golden.numbers["block"],
                budget: golden.numbers["budget"],
                sinks: golden.numbers["sink_blocks"],
                window: golden.numbers["window_blocks"],
                alpha: 0.0,
                dense_layers: 0,
                gather,
                select: if golden.numbers["share"] == 1 { Select::Head } else { Select::Layer },
                scoring: if golden.scoring.contains("row") { Scoring::Row } else { Scoring::Tile },
                correction: true,
            };
            let tiled = Tiled { past: 224, tile: 4 * sparse.block, filled: 0, group: 2 };
            let (seen, chosen) = golden.run(Form::Sparse(sparse, tiled), Update::Slice);
            let error = golden.error(&seen);
            assert!(error < 1e-6, "{}, {gather:?}: off by {error:.1e}", golden.name);
            // Stored for each head; with one choice for all, its members are every head's.
            let expected = golden.tensors["selected"].to_dtype(Kind::F32).unwrap();
            let expected: Vec<f32> = expected.flatten_all().unwrap().to_vec1().unwrap();
            let chosen = chosen.unwrap();
            assert_eq!(chosen, expected[..chosen.len()], "{}, {gather:?}", golden.name);
        }
    }
    assert_eq!(count, 5);
}
