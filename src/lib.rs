//! silane turns Hugging Face checkpoints into Core ML packages laid out for the Apple Neural Engine, and
//! proves a package right by running the emitted program.
//!
//! ```text
//! convert : checkpoint → models → passes → quant → check → package::save
//! quantize: package::open → quant → check → package::save
//! validate: package::open → interp, checkpoint → reference, → compare
//! ```

pub mod checkpoint;
pub mod cli;
pub mod error;
pub mod graph;
pub mod interp;
pub mod mil;
pub mod models;
pub mod nn;
pub mod ops;
pub mod package;
pub mod passes;
pub mod quant;
pub mod reference;
pub mod ui;

pub use error::{Error, Result};
