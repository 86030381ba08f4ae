//! Normalisation and softmax.

use super::Spec;

pub static SPECS: &[&Spec] = &[];
