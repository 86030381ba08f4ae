//! Pooling, resizing and pixel movement.

use super::Spec;

mod pool;
mod resize;
mod shuffle;

pub static SPECS: &[&Spec] = &[
    &pool::MAX_POOL,
    &pool::AVG_POOL,
    &pool::L2_POOL,
    &resize::UPSAMPLE_NEAREST_NEIGHBOR,
    &resize::UPSAMPLE_BILINEAR,
    &resize::RESIZE_NEAREST_NEIGHBOR,
    &resize::RESIZE_BILINEAR,
    &shuffle::PIXEL_SHUFFLE,
    &shuffle::PIXEL_UNSHUFFLE,
    &shuffle::DEPTH_TO_SPACE,
    &shuffle::SPACE_TO_DEPTH,
];
