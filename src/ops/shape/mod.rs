//! Reshaping, slicing, joining and moving.
//!
//! Nothing here computes, cumulative sums aside: results are elements of the operands, bit for bit.

mod elements;
mod join;
mod layout;
mod make;
mod order;
mod slice;

pub(super) use elements::{bounded, free, index, result, sizes, take, typed};

pub(crate) use slice::update;

use super::Spec;

pub static SPECS: &[&Spec] = &[
    &layout::RESHAPE,
    &layout::RESHAPE_LIKE,
    &layout::TRANSPOSE,
    &layout::EXPAND_DIMS,
    &layout::SQUEEZE,
    &layout::FLATTEN2D,
    &join::CONCAT,
    &join::STACK,
    &join::SPLIT,
    &join::TILE,
    &join::PAD,
    &slice::SLICE_BY_INDEX,
    &slice::SLICE_BY_SIZE,
    &slice::SLICE_UPDATE,
    &order::REVERSE,
    &order::REVERSE_SEQUENCE,
    &order::SLIDING_WINDOWS,
    &order::BAND_PART,
    &order::CUMSUM,
    &make::SHAPE,
    &make::FILL,
    &make::FILL_LIKE,
    &make::RANGE_1D,
];
