//! Ops on one element, or on two.

use super::Spec;

pub static SPECS: &[&Spec] = &[];
