//! Convolutions and matrix products.

use super::Spec;

pub static SPECS: &[&Spec] = &[];
