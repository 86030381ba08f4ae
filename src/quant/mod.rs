//! Quantization: weights of a program are compressed, whoever made it, and activations where a text taught
//! their ranges.
//!
//! A [`Policy`] says which weight gets which scheme, a [`Target`] which schemes are worth it, and [`apply`]
//! puts constexpr ops in the places of constants. Weights are encoded only while they are written, one at
//! a time, on all cores; [`encode`] is what is done to each.

mod activations;
mod allocate;
mod apply;
pub mod calibration;
mod cell;
mod content;
mod dense;
pub mod encoded;
mod feedback;
mod forms;
mod fp16;
pub mod grid;
mod guard;
mod histogram;
mod kmeans;
pub mod layout;
mod linear;
mod pack;
mod palette;
pub mod policy;
mod raise;
mod report;
pub mod scheme;
mod slabs;
mod smooth;
pub mod sparse;
mod uses;
mod vectors;

pub use activations::Activations;
pub use allocate::{Allocation, Budget, Choices, candidates, probes};
pub use apply::{Options, apply, apply_calibrated};
pub use calibration::{Calibration, Curve, Inputs, Method, Trial};
pub use cell::Quality;
pub use dense::decompress;
pub use encoded::{Encoded, Stats, encode};
pub use guard::Target;
pub use layout::Layout;
pub use policy::{Policy, Rule, SMALLEST};
pub use raise::raise;
pub use report::{Entry, Report, Skipped, Total, decibels};
pub use scheme::Scheme;
pub use smooth::{Smoothed, Smoothing, smooth};
