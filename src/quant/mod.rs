//! Compressed weights: what schemes there are, and how a weight is put into one.

pub mod encoded;
mod fp16;
pub mod grid;
mod histogram;
mod kmeans;
pub mod layout;
mod linear;
mod palette;
pub mod scheme;
pub mod sparse;
mod vectors;

pub use encoded::{Encoded, Stats, encode};
pub use layout::Layout;
pub use scheme::Scheme;
