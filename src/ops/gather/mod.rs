//! Picking elements by index, writing them by index, and finding indices.
//!
//! An index outside its size is an error here, whatever `validate_indices` says.

mod pick;
mod scatter;
mod search;

use super::{Param, Preset, Spec, from, written};
use crate::ops::{BOOL, Opset};

pub static SPECS: &[&Spec] = &[
    &pick::GATHER,
    &pick::GATHER_ALONG_AXIS,
    &pick::GATHER_ND,
    &scatter::SCATTER,
    &scatter::SCATTER_ALONG_AXIS,
    &scatter::SCATTER_ND,
    &search::TOPK,
    &search::ARGSORT,
    &search::ONE_HOT,
    &search::NON_ZERO,
    &search::NON_MAXIMUM_SUPPRESSION,
];

const VALIDATE: Param = from(Opset::Ios17, written("validate_indices", BOOL, Preset::Bool(false)));
