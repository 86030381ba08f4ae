//! Scaled dot-product attention.

use super::Spec;

pub static SPECS: &[&Spec] = &[];
