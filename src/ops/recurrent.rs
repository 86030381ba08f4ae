//! Recurrent layers.

use super::Spec;

pub static SPECS: &[&Spec] = &[];
