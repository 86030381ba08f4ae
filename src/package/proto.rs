//! The wire messages, generated from `proto/`.
#![allow(
    unreachable_pub,
    unused_qualifications,
    clippy::all,
    reason = "generated code; everything in it is private to `package`"
)]

include!(concat!(env!("OUT_DIR"), "/proto.rs"));
