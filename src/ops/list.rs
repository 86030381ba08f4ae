//! Lists of tensors.

use super::Spec;

pub static SPECS: &[&Spec] = &[];
