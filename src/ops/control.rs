//! Nested blocks: `cond` and `while_loop`, and `classify`.

use super::Spec;

pub static SPECS: &[&Spec] = &[];
