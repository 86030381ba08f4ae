//! Schemes and what they make of weights: awkward ones, bounds by the step, and what the op table decodes.

use std::collections::BTreeMap;

use half::f16;
use silane::{
    graph::{Builder, In},
    interp::{Machine, Precision, States},
    mil::{Const, DType, Literal, Program, TensorType, constant::encode_floats},
    ops::Opset,
    quant::{
        Encoded, Layout, Scheme, encode,
        encoded::{Table, pack},
        grid::Grid,
        scheme::{Granularity, Group, Linear, Sparse},
    },
};

const SCHEMES: &[&str] = &[
    "fp16",
    "int8",
    "int8:t",
    "int8:o",
    "int8:b8",
    "int4",
    "int4:b8",
    "int4:o:b8",
    "uint8",
    "uint8:s",
    "uint4:t",
    "uint4:b4",
    "uint4:s",
    "lut1",
    "lut2:g4",
    "lut3",
    "lut4",
    "lut4:g8",
    "lut4:g8i",
    "lut4:exact",
    "lut4:g4:i8",
    "lut6:g8",
    "lut8",
    "lut2:v2",
    "lut4:v4:g8",
    "lut3:v2:i8",
    "lut4:g8i:v2",
    "sparse50",
    "sparse75+lut4",
    "2:4+int8",
    "sparse12.5+int4:b8",
    "1:4",
    "sparse50+lut3:g8:i8",
    "2:4+uint8:t",
    "w8a8",
];

/// A weight with its axes.
struct Weight {
    name: &'static str,
    shape: Vec<usize>,
    axes: (usize, usize),
    values: Vec<f32>,
}

impl Weight {
    fn layout(&self) -> Layout<'_> {
        Layout { shape: &self.shape, output: self.axes.0, input: self.axes.1 }
    }

    /// The output channel of an element.
    fn output(&self, element: usize) -> usize {
        element / self.shape[self.axes.0 + 1..].iter().product::<usize>() % self.shape[self.axes.0]
    }

    fn input(&self, element: usize) -> usize {
        element / self.shape[self.axes.1 + 1..].iter().product::<usize>() % self.shape[self.axes.1]
    }
}

/// Numbers that look drawn from a normal distribution, as fp16.
fn normal(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 24) as f32
    };
    (0..count)
        .map(|_| {
            let sum: f32 = (0..12).map(|_| uniform()).sum();
            f16::from_f32((sum - 6.0) * 0.04).to_f32()
        })
        .collect()
}

fn weights() -> Vec<Weight> {
    let conv = |name, values: Vec<f32>| Weight {
        name,
        shape: vec![16, values.len() / 16, 1, 1],
        axes: (0, 1),
        values,
    };
    let edit = |edit: &dyn Fn(usize, f32) -> f32| -> Vec<f32> {
        normal(16 * 32, 7).into_iter().enumerate().map(|(i, x)| edit(i, x)).collect()
    };
    vec![
        conv("normal", normal(16 * 32, 1)),
        Weight { name: "matmul operand", shape: vec![32, 24], axes: (1, 0), values: normal(32 * 24, 2) },
        Weight { name: "wide matmul operand", shape: vec![16, 48], axes: (1, 0), values: normal(16 * 48, 5) },
        Weight { name: "3x3", shape: vec![8, 16, 3, 3], axes: (0, 1), values: normal(8 * 16 * 9, 3) },
        Weight {
            name: "transposed conv",
            shape: vec![16, 8, 2],
            axes: (1, 0),
            values: normal(16 * 8 * 2, 4),
        },
        Weight { name: "stack", shape: vec![2, 8, 3, 16], axes: (1, 3), values: normal(2 * 8 * 3 * 16, 4) },
        conv("zero rows", edit(&|i, x| if i / 32 % 3 == 0 { 0.0 } else { x })),
        conv("one outlier", edit(&|i, x| if i == 77 { 60.0 } else { x })),
        conv("signed zeros", edit(&|i, x| [x, 0.0, -0.0][i % 3])),
        conv("subnormal", edit(&|_, x| f16::from_f32(x * 1e-5).to_f32())),
        conv("tiny rows", edit(&|i, x| [0.0, 1e-6, 1e-5, 1.0][i / 32 % 4] * x * 8.0)),
        conv("below fp16", edit(&|_, x| x * 1e-38)),
        conv("largest", edit(&|i, _| if i % 2 == 0 { 65504.0 } else { -65504.0 })),
        conv("constant", vec![0.37; 16 * 32]),
        conv("all zero", vec![0.0; 16 * 32]),
        conv("positive", edit(&|_, x| x.abs() + 0.5)),
        conv("two values", edit(&|i, _| if i % 5 == 0 { -0.25 } else { 1.5 })),
        conv("one column", normal(16, 9)),
        Weight { name: "one element", shape: vec![1, 1], axes: (0, 1), values: vec![-0.3] },
        Weight { name: "one row", shape: vec![1, 64], axes: (0, 1), values: normal(64, 11) },
    ]
}

/// Every scheme and every weight it fits.
fn each(mut check: impl FnMut(&str, &Scheme, &Weight, &Encoded, &[f32])) {
    let mut fitting = 0;
    for weight in weights() {
        for text in SCHEMES {
            let scheme: Scheme = text.parse().unwrap();
            if scheme.fits(weight.layout()).is_err() {
                assert!(encode(&weight.values, weight.layout(), &scheme, None).is_err(), "{text}");
                continue;
            }
            let place = format!("{} {text}", weight.name);
            let encoded = encode(&weight.values, weight.layout(), &scheme, None)
                .unwrap_or_else(|e| panic!("{place}: {e}"));
            let decoded = encoded.decode(weight.layout()).unwrap();
            check(&place, &scheme, &weight, &encoded, &decoded);
            fitting += 1;
        }
    }
    assert!(fitting > 500, "{fitting}");
}

#[test]
fn the_op_table_decodes_every_scheme_bit_for_bit() {
    each(|place, _, weight, encoded, decoded| {
        let seen = run(encoded, weight).unwrap_or_else(|e| panic!("{place}: {e}"));
        assert_eq!(seen.len(), decoded.len(), "{place}");
        for (i, (a, b)) in seen.iter().zip(decoded).enumerate() {
            // Zeros of both signs are one.
            assert!((a + 0.0).to_bits() == (b + 0.0).to_bits(), "{place} [{i}]: {a} and {b}");
        }
    });
}

#[test]
fn scales_are_above_zero_and_codes_are_defined() {
    each(|place, _, _, encoded, decoded| {
        assert!(decoded.iter().all(|y| y.is_finite() && f16::from_f32(*y).to_f32() == *y), "{place}");
        let dense = match encoded {
            Encoded::Sparse { inner, .. } => &**inner,
            other => other,
        };
        match dense {
            Encoded::Linear { codes, scale, offset, linear, .. } => {
                assert!(scale.iter().all(|s| *s > 0.0 && f16::from_f32(*s).to_f32() == *s), "{place}");
                let (low, high) = linear.range();
                let code = |c: u8| if linear.signed { i32::from(c.cast_signed()) } else { i32::from(c) };
                assert!(codes.iter().all(|c| (low..=high).contains(&code(*c))), "{place}");
                assert!(offset.iter().flatten().all(|z| (low..=high).contains(z)), "{place}");
                assert_eq!(offset.is_some(), linear.has_offset(), "{place}");
            }
            Encoded::Palette { indices, palette, lut, .. } => {
                assert!(indices.iter().all(|i| usize::from(*i) < palette.entries()), "{place}");
                assert_eq!(lut.int8.is_some(), palette.int8, "{place}");
            }
            _ => {}
        }
    });
}

#[test]
fn zero_rows_stay_zero() {
    each(|place, scheme, weight, _, decoded| {
        if matches!(scheme.inner(), Scheme::Palette(p) if p.vector > 1) {
            return;
        }
        for row in 0..weight.shape[weight.axes.0] {
            let of = |values: &[f32]| -> Vec<f32> {
                (0..values.len()).filter(|i| weight.output(*i) == row).map(|i| values[i]).collect()
            };
            if of(&weight.values).iter().all(|x| *x == 0.0) {
                assert!(of(decoded).iter().all(|y| *y == 0.0), "{place}: row {row}");
            }
        }
    });
}

/// No group is worse than if its largest value had set the step.
#[test]
fn errors_are_bounded_by_the_step() {
    each(|place, scheme, weight, encoded, decoded| {
        let mask: Vec<bool> = match encoded {
            Encoded::Sparse { mask, .. } => mask.clone(),
            _ => vec![true; decoded.len()],
        };
        // Group → smallest, largest, number, squared error, of what is kept.
        let mut groups: BTreeMap<usize, (f64, f64, f64, f64)> = BTreeMap::new();
        for (i, (x, y)) in weight.values.iter().zip(decoded).enumerate().filter(|(i, _)| mask[*i]) {
            let (o, n) = (weight.output(i), weight.input(i));
            let group = match scheme.inner() {
                Scheme::Linear(l) => match l.granularity {
                    Granularity::Tensor => 0,
                    Granularity::Channel => o,
                    Granularity::Block(size) => o * 1000 + n / size.min(weight.shape[weight.axes.1]),
                },
                Scheme::Palette(p) => match p.group {
                    Group::Tensor => 0,
                    Group::Channels { size, axis: silane::quant::scheme::Axis::Output } => o / size,
                    Group::Channels { size, .. } => n / size,
                },
                _ => 0,
            };
            let (x, y) = (f64::from(*x), f64::from(*y));
            let g = groups.entry(group).or_insert((0.0, 0.0, 0.0, 0.0));
            *g = (g.0.min(x), g.1.max(x), g.2 + 1.0, g.3 + (x - y).powi(2));
        }
        for (group, (low, high, count, error)) in groups {
            let largest = high.max(-low);
            let step = match scheme.inner() {
                Scheme::Dense => 0.0,
                Scheme::Linear(l) if l.offset => 2.0 * (high - low) / f64::from((1 << l.bits) - 1),
                Scheme::Linear(l) => largest / f64::from((1 << (l.bits - 1)) - 1),
                // Even steps in each dimension, of codes that steps of int8 shift.
                Scheme::Palette(p) => {
                    let entries = (p.entries() as f64).powf(1.0 / p.vector as f64).floor();
                    let zero = if entries > 1.0 { 1.0 } else { 0.0 };
                    let coarse = if p.int8 { largest / 127.0 } else { 0.0 };
                    (high - low) / (entries - zero).max(1.0) + coarse
                }
                Scheme::Sparse(..) | Scheme::W8A8 => unreachable!(),
            };
            // Steps have eleven bits and are no smaller than fp16's smallest; so have decoded values.
            let half = step * (1.0 + 1.0 / 1024.0) / 2.0 + largest / 2048.0 + f64::from(f16::from_bits(1));
            assert!(error <= count * half * half, "{place}: group {group}: {error} > {count} * {half}^2");
        }
    });
}

/// No weight is worse than with the scale that spreads the codes over its range, which is what others take.
#[test]
fn searching_never_loses() {
    let mut gains = 0;
    for weight in weights() {
        let values: Vec<f32> = weight.values.iter().map(|x| f16::from_f32(*x).to_f32()).collect();
        for text in [
            "int8", "int8:t", "int8:o", "int4", "int4:b8", "int4:o", "uint8", "uint8:s", "uint4:t",
            "uint4:b4",
        ] {
            let scheme: Scheme = text.parse().unwrap();
            let Scheme::Linear(linear) = scheme else { unreachable!() };
            let Ok(encoded) = encode(&values, weight.layout(), &scheme, None) else { continue };
            let error = encoded.stats(&values, weight.layout()).unwrap().squared_error;
            let mut groups: BTreeMap<usize, Vec<f32>> = BTreeMap::new();
            for (i, x) in values.iter().enumerate() {
                let (o, n) = (weight.output(i), weight.input(i));
                let group = match linear.granularity {
                    Granularity::Tensor => 0,
                    Granularity::Channel => o,
                    Granularity::Block(size) => o * 1000 + n / size.min(weight.shape[weight.axes.1]),
                };
                groups.entry(group).or_default().push(*x);
            }
            let plain: f64 = groups.values().map(|x| plain_error(x, linear)).sum();
            // Ties may fall to either side, and of 4 bits the rounding of products is not looked at.
            let place = format!("{} {text}: {error:e}, plain {plain:e}", weight.name);
            assert!(error <= plain * (1.0 + 1e-4), "{place}");
            gains += usize::from(error < plain * 0.99);
        }
    }
    assert!(gains > 50, "{gains}");
}

fn plain_error(values: &[f32], linear: Linear) -> f64 {
    let low = values.iter().copied().fold(0f32, f32::min);
    let high = values.iter().copied().fold(0f32, f32::max);
    if low == 0.0 && high == 0.0 {
        return 0.0;
    }
    let (first, last) = linear.range();
    let (scale, zero) = if linear.offset {
        let scale = f64::from(high - low) / f64::from(last - first);
        (scale, (f64::from(first) - f64::from(low) / scale).round_ties_even())
    } else {
        (f64::from(high.max(-low)) / f64::from(last - linear.middle()), f64::from(linear.middle()))
    };
    let scale = f64::from(f16::from_f64(scale).to_f32().max(f16::from_bits(1).to_f32()));
    let error = |x: &f32| {
        let code = (f64::from(*x) / scale).round_ties_even() + zero;
        let code = code.clamp(f64::from(first), f64::from(last));
        (f64::from(*x) - f16::from_f64(scale * (code - zero)).to_f64()).powi(2)
    };
    values.iter().map(error).sum()
}

#[test]
fn groups_of_few_values_are_exact() {
    for name in ["constant", "two values", "all zero", "one element"] {
        let weight = weights().into_iter().find(|w| w.name == name).unwrap();
        for text in ["lut1", "lut4", "lut4:exact", "lut8:g16", "lut4:v2", "lut6:v4", "sparse50+lut1"] {
            let scheme: Scheme = text.parse().unwrap();
            if scheme.fits(weight.layout()).is_err() {
                continue;
            }
            let encoded = encode(&weight.values, weight.layout(), &scheme, None).unwrap();
            let decoded = encoded.decode(weight.layout()).unwrap();
            let halves = weight.values.iter().map(|x| f16::from_f32(*x).to_f32());
            for (i, (x, y)) in halves.zip(decoded).enumerate() {
                let dropped = matches!(&encoded, Encoded::Sparse { mask, .. } if !mask[i]);
                assert!(dropped || x == y, "{name} {text} [{i}]: {x} {y}");
            }
        }
    }
}

/// The default search is a hundredth off the best table at most, as far as fp16 tells.
#[test]
fn tables_are_close_to_the_best() {
    let mut compared = 0;
    for weight in weights() {
        let values: Vec<f32> = weight.values.iter().map(|x| f16::from_f32(*x).to_f32()).collect();
        for text in ["lut1", "lut2:g4", "lut3:g8i", "lut4", "lut4:g8", "lut6", "sparse50+lut2"] {
            let [fast, exact] = [text.to_string(), format!("{text}:exact")].map(|text| {
                let scheme: Scheme = text.parse().unwrap();
                let encoded = encode(&values, weight.layout(), &scheme, None).ok()?;
                Some(encoded.stats(&values, weight.layout()).unwrap().squared_error)
            });
            let Some((fast, exact)) = fast.zip(exact) else { continue };
            let step = f64::from(f16::from_bits(1));
            let place = format!("{} {text}: {fast:e} {exact:e}", weight.name);
            assert!(exact <= fast, "{place}");
            assert!(fast <= 1.01 * exact + values.len() as f64 * step * step / 4.0, "{place}");
            compared += 1;
        }
    }
    assert!(compared > 80, "{compared}");
}

/// One thread or two, the result is the same; large enough for all that is done in pieces.
#[test]
fn results_do_not_depend_on_threads() {
    let pool = |n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap();
    let (one, two) = (pool(1), pool(2));
    let (shape, values) = ([1056, 1024], normal(1056 * 1024, 21));
    let importance: Vec<f32> = normal(1024, 22).iter().map(|x| x * x).collect();
    for (output, input) in [(0, 1), (1, 0)] {
        let layout = Layout { shape: &shape, output, input };
        for text in [
            "int8",
            "int8:t",
            "int4:b32",
            "uint4:o",
            "lut4",
            "lut4:g16",
            "lut3:v2",
            "sparse30+lut4",
            "2:4+int4:t",
        ] {
            let scheme: Scheme = text.parse().unwrap();
            let importance = (shape[input] == 1024).then_some(&*importance);
            let run = || {
                let encoded = encode(&values, layout, &scheme, importance).unwrap();
                let stats = encoded.stats(&values, layout).unwrap();
                (encoded, stats)
            };
            assert!(one.install(run) == two.install(run), "{text} differs, output axis {output}");
        }
    }
}

#[test]
fn schemes_read_what_they_write() {
    for text in SCHEMES {
        let scheme: Scheme = text.parse().unwrap();
        assert_eq!(scheme.to_string().parse::<Scheme>().unwrap(), scheme, "{text}");
    }
    for (text, canonical) in [
        ("int8:s", "int8"),
        ("uint4:o:b32", "uint4:b32"),
        ("int4:b32:o", "int4:o:b32"),
        ("lut4:exact:g16", "lut4:g16:exact"),
        ("sparse50.0+fp16", "sparse50"),
        ("lut4:i8:v2:g8i", "lut4:g8i:v2:i8"),
    ] {
        assert_eq!(text.parse::<Scheme>().unwrap().to_string(), canonical, "{text}");
    }
    for (text, says) in [
        ("", "is no scheme"),
        ("int3", "is no scheme"),
        ("INT8", "is no scheme"),
        ("lut5", "5 bits"),
        ("lut", "is no scheme"),
        ("lut4:v3", "vectors of 3"),
        ("lut4:g0", "0 channels"),
        ("lut4:g2:v4", "do not divide"),
        ("lut4:g8:g16", "contradicts"),
        ("lut4:exact:i8", "can be exact"),
        ("lut4:exact:v2", "can be exact"),
        ("lut4:b32", "says nothing of"),
        ("int8:g8", "says nothing of"),
        ("int4:t:b8", "contradicts"),
        ("int4:o:o", "given twice"),
        ("int4:o:s", "contradicts"),
        ("int4:b0", "0 inputs"),
        ("sparse0", "drops 0 percent"),
        ("sparse100", "drops 100 percent"),
        ("sparse-5", "is no scheme"),
        ("sparsenan", "is no scheme"),
        ("4:2", "keeps 4 of 2"),
        ("0:4", "keeps 0 of 4"),
        ("sparse50+2:4", "is no scheme"),
        ("sparse50+lut4:v2", "no vectors"),
        ("lut4+int8", "is no scheme"),
        ("w8a8:t", "is no scheme"),
        ("sparse50+w8a8", "is no scheme"),
    ] {
        let error = text.parse::<Scheme>().unwrap_err();
        assert!(error.message().contains(says), "{text}: {error}");
    }
}

#[test]
fn weights_that_do_not_fit_are_refused() {
    for (text, shape, (output, input), says, hint) in [
        ("lut4:g16", [120, 8], (0, 1), "groups of 16 do not divide 120 output channels", "15 and 20"),
        ("int4:b32", [8, 100], (0, 1), "groups of 32 do not divide 100 input channels", "25 and 50"),
        ("lut4:g16i", [8, 120], (0, 1), "groups of 16 do not divide 120 input channels", "15 and 20"),
        ("lut4:v2", [9, 8], (0, 1), "9 outputs are no whole number of vectors of 2", "single"),
        ("int8", [8, 8], (0, 0), "axes 0 and 0 are no output and input axis", ""),
        ("int8", [8, 8], (0, 2), "axes 0 and 2 are no output and input axis", ""),
        ("int8", [0, 8], (0, 1), "cannot be compressed", ""),
        ("int8", [usize::MAX, 8], (0, 1), "cannot be compressed", ""),
    ] {
        let count = shape.iter().copied().fold(1usize, usize::wrapping_mul).min(1 << 20);
        let layout = Layout { shape: &shape, output, input };
        let error = encode(&vec![1.0; count], layout, &text.parse().unwrap(), None).unwrap_err();
        assert!(error.message().contains(says), "{text}: {error}");
        assert!(error.way_out().unwrap_or("").contains(hint), "{text}: {error}");
    }
    // One that is larger than the axis is one group.
    for text in ["lut4:g16", "int4:b32"] {
        let layout = Layout { shape: &[1, 10], output: 0, input: 1 };
        assert!(encode(&[1.0; 10], layout, &text.parse().unwrap(), None).is_ok(), "{text}");
    }
    let layout = Layout { shape: &[2, 2], output: 0, input: 1 };
    let int8: Scheme = "int8".parse().unwrap();
    for (values, says) in [
        (vec![1.0, f32::NAN, 0.0, 0.0], "value 1 is NaN"),
        (vec![1.0, 2.0, f32::NEG_INFINITY, 0.0], "value 2 is -inf"),
        (vec![1.0, 2.0, 3.0, 65520.0], "value 3 is 65520"),
        (vec![1.0], "1 values for a weight"),
    ] {
        for scheme in SCHEMES {
            let error = encode(&values, layout, &scheme.parse().unwrap(), None).unwrap_err();
            let fits = scheme.parse::<Scheme>().unwrap().fits(layout).is_ok();
            assert!(!fits || error.message().contains(says), "{scheme}: {error}");
        }
    }
    for (importance, says) in [
        (vec![1.0, -1.0], "importance 1 is -1"),
        (vec![f32::NAN, 1.0], "importance 0 is NaN"),
        (vec![1.0; 3], "3 numbers of importance"),
    ] {
        let error = encode(&[1.0; 4], layout, &int8, Some(&importance)).unwrap_err();
        assert!(error.message().contains(says), "{error}");
    }
    assert!(encode(&[1.0, 2.0, 3.0, 4.0], layout, &int8, Some(&[0.0; 4])).is_ok());
}

/// What is told to count more is off by less.
#[test]
fn importance_counts() {
    let (shape, values) = ([16, 64], normal(16 * 64, 31));
    let layout = Layout { shape: &shape, output: 0, input: 1 };
    let inputs: Vec<f32> = (0..64).map(|i| if i % 8 == 0 { 400.0 } else { 1.0 }).collect();
    let each: Vec<f32> = (0..16 * 64).map(|i| inputs[i % 64]).collect();
    for text in [
        "int4",
        "int4:t",
        "uint4",
        "int4:b32",
        "lut3:g4",
        "lut4",
        "lut4:exact",
        "lut4:v2",
        "lut3:i8",
        "sparse50+lut3",
    ] {
        let scheme: Scheme = text.parse().unwrap();
        let plain = encode(&values, layout, &scheme, None).unwrap();
        let heavy = encode(&values, layout, &scheme, Some(&inputs)).unwrap();
        let error = |e: &Encoded| e.weighted_error(&values, layout, Some(&each)).unwrap();
        assert!(error(&heavy) < error(&plain), "{text}: {} {}", error(&heavy), error(&plain));
        assert_eq!(heavy, encode(&values, layout, &scheme, Some(&each)).unwrap(), "{text}");
    }
}

#[test]
fn sparse_weights_keep_the_largest() {
    for weight in weights() {
        for text in ["sparse50", "sparse90", "2:4", "1:3", "sparse50+int8", "2:4+lut4"] {
            let scheme: Scheme = text.parse().unwrap();
            let Scheme::Sparse(sparse, _) = scheme else { unreachable!() };
            let Encoded::Sparse { mask, .. } =
                encode(&weight.values, weight.layout(), &scheme, None).unwrap()
            else {
                panic!("{text} is not sparse")
            };
            let place = format!("{} {text}", weight.name);
            let count = weight.values.len();
            let sets: Vec<Vec<usize>> = match sparse {
                Sparse::Percent(_) => vec![(0..count).collect()],
                Sparse::Pattern { m, .. } => {
                    let after: usize = weight.shape[weight.axes.1 + 1..].iter().product();
                    let mut sets: BTreeMap<(usize, usize, usize), Vec<usize>> = BTreeMap::new();
                    for i in 0..count {
                        let inputs = weight.shape[weight.axes.1];
                        let key = (i / after / inputs, i % after, weight.input(i) / m);
                        sets.entry(key).or_default().push(i);
                    }
                    sets.into_values().collect()
                }
            };
            for set in sets {
                let most = match sparse {
                    Sparse::Percent(p) => count - (count as f64 * f64::from(p) / 100.0).round() as usize,
                    Sparse::Pattern { n, .. } => n.min(set.len()),
                };
                let (kept, dropped): (Vec<usize>, Vec<usize>) = set.iter().partition(|i| mask[**i]);
                let nonzero = set.iter().filter(|i| weight.values[**i] != 0.0).count();
                assert_eq!(kept.len().max(1), most.min(nonzero).max(1), "{place}");
                let size = |i: &usize| weight.values[*i].abs();
                let least = kept.iter().map(size).fold(f32::INFINITY, f32::min);
                assert!(dropped.iter().all(|i| size(i) <= least), "{place}");
            }
        }
    }
}

/// Rounding element by element on the grid is what encoding does.
#[test]
fn grids_give_the_codes_of_encoding() {
    for weight in weights() {
        for text in ["int8", "int4:b8", "uint4:t", "lut4:g8", "lut6", "lut4:v2", "lut3:g8:i8"] {
            let scheme: Scheme = text.parse().unwrap();
            let layout = weight.layout();
            let Ok(grid) = Grid::fit(&weight.values, layout, &scheme, None) else { continue };
            let encoded = encode(&weight.values, layout, &scheme, None).unwrap();
            let (Encoded::Linear { codes, .. } | Encoded::Palette { indices: codes, .. }) = &encoded else {
                panic!("{text}")
            };
            let decoded = encoded.decode(layout).unwrap();
            let (vector, apart) =
                (grid.vector(), weight.shape[weight.axes.0 + 1..].iter().product::<usize>());
            let mut value = vec![0.0; vector];
            for (i, code) in codes.iter().enumerate() {
                let at = |j: usize| (i / apart * vector + j) * apart + i % apart;
                let element: Vec<f32> = (0..vector).map(|j| weight.values[at(j)]).collect();
                let place = format!("{} {text} {i}", weight.name);
                assert_eq!(grid.nearest(grid.group(i), &element), *code, "{place}");
                grid.value(grid.group(i), *code, &mut value);
                assert!((0..vector).all(|j| value[j] == decoded[at(j)]), "{place}");
            }
            assert_eq!(grid.finish(codes.clone()).unwrap(), encoded, "{} {text}", weight.name);
        }
    }
}

#[test]
fn bits_and_decibels_are_what_they_say() {
    let (shape, values) = ([32, 64], normal(32 * 64, 41));
    let layout = Layout { shape: &shape, output: 0, input: 1 };
    for (text, bits, decibels) in [
        ("fp16", 16.0, f64::INFINITY),
        ("int8", 8.0 + 16.0 / 64.0, 40.0),
        ("int4:b32", 4.0 + 16.0 / 32.0, 20.0),
        ("uint4:b32", 4.0 + 20.0 / 32.0, 20.0),
        ("lut4", 4.0 + 256.0 / 2048.0, 20.0),
        ("lut4:g8", 4.0 + 4.0 * 256.0 / 2048.0, 20.0),
        ("lut4:v2", 2.0 + 512.0 / 2048.0, 9.0),
        ("lut6:i8", 6.0 + (512.0 + 16.0) / 2048.0, 28.0),
        ("sparse50", 1.0 + 8.0, 10.0),
        ("2:4+int8:t", 1.0 + 4.0 + 16.0 / 2048.0, 8.0),
    ] {
        let encoded = encode(&values, layout, &text.parse().unwrap(), None).unwrap();
        let stats = encoded.stats(&values, layout).unwrap();
        assert_eq!(stats.bits_per_weight, bits, "{text}");
        assert!(stats.sqnr_db >= decibels, "{text}: {} dB", stats.sqnr_db);
        let decoded = encoded.decode(layout).unwrap();
        let off = values.iter().zip(&decoded).map(|(x, y)| (f64::from(*x) - f64::from(*y)).powi(2));
        assert!((off.sum::<f64>() - stats.squared_error).abs() <= 1e-9 * stats.squared_error, "{text}");
    }
}

/// Runs what a package would hold.
fn run(encoded: &Encoded, weight: &Weight) -> silane::Result<Vec<f32>> {
    let mut b = Builder::new(Opset::Ios18);
    let halves = |shape: &[usize], values: &[f32]| {
        let ty = TensorType::new(DType::F16, shape.iter().copied());
        Const::literal(ty, Literal::Bytes(encode_floats(DType::F16, values).unwrap()))
    };
    let packed = |dtype: DType, shape: &[usize], codes: &[u8]| {
        let ty = TensorType::new(dtype, shape.iter().copied());
        let bits = u8::try_from(dtype.bits().unwrap()).unwrap();
        Const::literal(ty, Literal::Bytes(pack(codes, bits)))
    };
    let table = |b: &mut Builder, shape: &[usize], lut: &Table| -> silane::Result<In> {
        let Some(int8) = &lut.int8 else { return Ok(halves(shape, &lut.values).into()) };
        let codes: Vec<u8> = int8.codes.iter().map(|c| c.cast_unsigned()).collect();
        let mut scales = shape.to_vec();
        let rank = scales.len();
        scales[rank - 2..].fill(1);
        let data = packed(DType::I8, shape, &codes);
        let scale = halves(&scales, &int8.scale);
        let params = [("data", data.into()), ("scale", scale.into())];
        Ok(b.op("constexpr_blockwise_shift_scale", "lut", params)?.into())
    };
    let integer = |bits: u8, signed: bool| match (bits, signed) {
        (4, true) => DType::I4,
        (4, false) => DType::U4,
        (8, true) => DType::I8,
        (1, _) => DType::U1,
        (2, _) => DType::U2,
        (3, _) => DType::U3,
        (6, _) => DType::U6,
        _ => DType::U8,
    };
    let mask = |mask: &[bool]| -> In {
        let bits: Vec<u8> = mask.iter().map(|m| u8::from(*m)).collect();
        packed(DType::U1, &weight.shape, &bits).into()
    };
    let (given, dense) = match encoded {
        Encoded::Sparse { mask: m, inner } => (Some(mask(m)), &**inner),
        other => (None, other),
    };
    let kept = |count: usize| if given.is_some() { vec![count] } else { weight.shape.clone() };
    let values: In = match dense {
        Encoded::Dense { values } => {
            let values: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
            halves(&kept(values.len()), &values).into()
        }
        Encoded::Linear { codes, scale, offset, scale_shape, linear } => {
            let dtype = integer(linear.bits, linear.signed);
            let data = packed(dtype, &kept(codes.len()), codes);
            let zero = offset.as_ref().map(|zero| {
                let bytes: Vec<u8> = zero.iter().map(|z| (*z & 0xff) as u8).collect();
                packed(dtype, scale_shape, &bytes)
            });
            let zero = zero.map_or(In::none(), In::from);
            let scale = In::from(halves(scale_shape, scale));
            if let Some(mask) = &given {
                let params = [
                    ("data_mask", mask.clone()),
                    ("nonzero_data", data.into()),
                    ("scale", scale),
                    ("offset", zero),
                ];
                b.ops("constexpr_sparse_blockwise_shift_scale", "w", params)?[1].into()
            } else {
                let params = [("data", data.into()), ("scale", scale), ("offset", zero)];
                b.op("constexpr_blockwise_shift_scale", "w", params)?.into()
            }
        }
        Encoded::Palette { indices, lut, lut_shape, vector_axis, palette } => {
            let mut shape = weight.shape.clone();
            if let Some(axis) = vector_axis {
                shape[*axis] /= palette.vector;
            }
            let shape = if given.is_some() { kept(indices.len()) } else { shape };
            let codes = packed(integer(palette.bits, false), &shape, indices);
            let lut = table(&mut b, lut_shape, lut)?;
            let axis = vector_axis.map_or(In::none(), |axis| In::from(i32::try_from(axis).unwrap()));
            if let Some(mask) = &given {
                let params = [
                    ("indices_mask", mask.clone()),
                    ("indices_nonzero_data", codes.into()),
                    ("lut", lut),
                    ("vector_axis", axis),
                ];
                b.ops("constexpr_lut_to_sparse", "w", params)?[1].into()
            } else {
                b.op(
                    "constexpr_lut_to_dense",
                    "w",
                    [("indices", codes.into()), ("lut", lut), ("vector_axis", axis)],
                )?
                .into()
            }
        }
        Encoded::Sparse { .. } => unreachable!(),
    };
    let out = match given {
        Some(mask) => {
            b.op("constexpr_sparse_to_dense", "dense", [("nonzero_data", values), ("mask", mask)])?
        }
        None => b.op("identity", "dense", [("x", values)])?,
    };
    let mut program = Program::default();
    program.functions.insert("main".into(), b.finish(vec![out]));
    let mut machine = Machine::new(&program, Precision::Fp16);
    let results = machine.run("main", &BTreeMap::new(), &mut States::default(), None)?;
    results.into_values().next().unwrap().to_floats()
}
