//! Acting on programs: building them, one op at a time, and checking them.

pub mod build;
pub mod check;
pub mod measure;

pub use build::{Builder, In};
pub use check::{Checked, Problem, Severity, check, problems};
pub use measure::Measure;
