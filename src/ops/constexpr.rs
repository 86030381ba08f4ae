//! Compressed weights: what is expanded when the program is compiled.

use super::Spec;

pub static SPECS: &[&Spec] = &[];
