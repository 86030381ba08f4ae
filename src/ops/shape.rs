//! Reshaping, slicing, joining and moving.

use super::Spec;

pub static SPECS: &[&Spec] = &[];
