//! Pooling, resizing and pixel movement.

use super::Spec;

pub static SPECS: &[&Spec] = &[];
