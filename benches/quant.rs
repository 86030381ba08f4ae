//! Every scheme on one weight: weights a second, squared error, and for tables its ratio to the best table.
//!
//! ```text
//! cargo bench --bench quant -- [--rows R] [--columns C] [--save FILE] [SCHEME …]
//! cargo bench --bench quant -- [--rows R] [--columns C] --package FILE.mlpackage
//! ```
//!
//! The weight is drawn from a normal distribution, with a scale for each row and some outliers, and is the same each
//! time; `--save` writes it as fp16, row-major, and `--package` as the one weight of a package, without measuring
//! anything. `benches/quant.sh` sets coremltools beside it, `benches/memory.sh` quantizes the package.
#![expect(clippy::print_stdout, clippy::unwrap_used, reason = "a bench reports, and fails by panicking")]

use std::{collections::BTreeMap, fs, hint::black_box, path::Path, time::Instant};

use half::f16;
use silane::{
    graph::{Builder, check},
    mil::{Bytes, DType, Program, Type, Weight},
    ops::Opset,
    package::{Interface, Save, save},
    passes,
    quant::{
        Encoded, Layout, Scheme, encode,
        scheme::{Effort, Palette},
    },
};

const SCHEMES: &[&str] = &[
    "fp16",
    "int8",
    "int8:t",
    "int8:o",
    "uint8",
    "int4",
    "int4:b32",
    "uint4:b32",
    "lut1",
    "lut2:g8",
    "lut3:g8",
    "lut4",
    "lut4:g8",
    "lut4:g16",
    "lut4:g16i",
    "lut4:g16:i8",
    "lut6",
    "lut6:g8",
    "lut6:g16",
    "lut8",
    "lut8:g16",
    "lut4:v2",
    "lut4:v2:g16",
    "lut8:v4",
    "sparse50",
    "2:4",
    "sparse50+int8",
    "sparse50+lut4:g16",
];

fn main() {
    let (mut rows, mut columns, mut file, mut package, mut schemes) = (4864, 896, None, None, Vec::new());
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--rows" => rows = args.next().unwrap().parse().unwrap(),
            "--columns" => columns = args.next().unwrap().parse().unwrap(),
            "--save" => file = args.next(),
            "--package" => package = args.next(),
            "--bench" => {}
            scheme => schemes.push(scheme.to_string()),
        }
    }
    let values = weight(rows, columns);
    if let Some(file) = file {
        fs::write(file, bytes(&values)).unwrap();
    }
    if let Some(path) = package {
        return write(Path::new(&path), rows, columns, bytes(&values));
    }
    if schemes.is_empty() {
        schemes = SCHEMES.iter().map(|s| (*s).to_string()).collect();
    }
    let shape = [rows, columns];
    let layout = Layout { shape: &shape, output: 0, input: 1 };
    println!("{rows} x {columns} on {} threads", rayon::current_num_threads());
    println!(
        "{:<22} {:>14} {:>16} {:>9} {:>10} {:>10}",
        "scheme", "M weights/s", "squared error", "dB", "to exact", "cpu ns"
    );
    for text in schemes {
        let scheme: Scheme = text.parse().unwrap();
        let run = |scheme: &Scheme| encode(&values, layout, scheme, None).unwrap();
        let error = |e: &Encoded| e.stats(&values, layout).unwrap();
        let stats = error(&run(&scheme));
        let exact = match scheme {
            Scheme::Palette(p) if p.vector == 1 && !p.int8 => {
                let exact = run(&Scheme::Palette(Palette { effort: Effort::Exact, ..p }));
                format!("{:.6}", stats.squared_error / error(&exact).squared_error)
            }
            _ => "-".into(),
        };
        let (seconds, cpu) = seconds(|| drop(black_box(run(&scheme))));
        let count = values.len() as f64;
        println!(
            "{text:<22} {:>14.1} {:>16.6} {:>9.3} {exact:>10} {:>10}",
            count / seconds / 1e6,
            stats.squared_error,
            stats.sqnr_db,
            cpu.map_or("-".into(), |s| format!("{:.1}", s * 1e9 / count))
        );
    }
}

/// The least seconds of some rounds, and the mean of the processor's on all cores, which other programs do not
/// change.
fn seconds(mut f: impl FnMut()) -> (f64, Option<f64>) {
    let (start, before, mut least, mut rounds) = (Instant::now(), processor(), f64::INFINITY, 0usize);
    while rounds < 3 || start.elapsed().as_secs_f64() < 2.0 {
        let round = Instant::now();
        f();
        least = least.min(round.elapsed().as_secs_f64());
        rounds += 1;
    }
    (least, processor().zip(before).map(|(after, before)| (after - before) / rounds as f64))
}

/// Seconds that the threads of this process have run for, where the system tells.
fn processor() -> Option<f64> {
    let tasks = fs::read_dir("/proc/self/task").ok()?;
    let ran = |task: fs::DirEntry| -> Option<f64> {
        let stat = fs::read_to_string(task.path().join("schedstat")).ok()?;
        stat.split_whitespace().next()?.parse::<f64>().ok()
    };
    Some(tasks.filter_map(|t| ran(t.ok()?)).sum::<f64>() / 1e9)
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect()
}

/// A package of one convolution.
fn write(path: &Path, rows: usize, columns: usize, bytes: Vec<u8>) {
    let mut b = Builder::new(Opset::Ios18);
    let x = b.input("x", Type::tensor(DType::F16, [1, columns, 1, 1])).unwrap();
    let weight =
        Weight::new("weight", DType::F16, [rows, columns, 1, 1], move || Ok(Bytes::Owned(bytes.clone())));
    let inputs = [
        ("x", x.into()),
        ("weight", weight.into()),
        ("strides", [1, 1].into()),
        ("pad_type", "valid".into()),
        ("pad", [0, 0, 0, 0].into()),
        ("dilations", [1, 1].into()),
        ("groups", 1.into()),
    ];
    let y = b.op("conv", "y", inputs).unwrap();
    let functions = BTreeMap::from([("main".to_string(), b.finish(vec![y]))]);
    let mut program = Program { functions, ..Program::default() };
    passes::tidy(&mut program).unwrap();
    let interface = Interface::of(&program).unwrap();
    save(path, &check(program).unwrap(), &interface, Save { force: true, ..Save::default() }).unwrap();
}

fn weight(rows: usize, columns: usize) -> Vec<f32> {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 + 0.5) / (1u64 << 24) as f32
    };
    let mut values = Vec::with_capacity(rows * columns);
    for _ in 0..rows {
        let scale = 0.02 * (uniform() - 0.5).exp();
        for _ in 0..columns {
            let normal = (-2.0 * uniform().ln()).sqrt() * (std::f32::consts::TAU * uniform()).cos();
            let outlier = if uniform() < 2e-4 { 8.0 } else { 1.0 };
            values.push(f16::from_f32(normal * scale * outlier).to_f32());
        }
    }
    values
}
