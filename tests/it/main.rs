//! One test binary, one module a room.

#![cfg(test)]

mod activations;
mod arrows;
mod calibrate;
mod check;
mod checkpoint;
mod cli;
mod damage;
mod interp;
mod models;
mod ops;
mod package;
mod quant;
mod quantize;
mod reference;
mod smooth;
mod tidy;
