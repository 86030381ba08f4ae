//! Reductions along axes, and their positions.

use super::Spec;

pub static SPECS: &[&Spec] = &[];
