//! Gathering, scattering, sorting and one-hot.

use super::Spec;

pub static SPECS: &[&Spec] = &[];
