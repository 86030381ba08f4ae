//! Reading and writing states.

use super::Spec;

pub static SPECS: &[&Spec] = &[];
