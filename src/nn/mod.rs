//! The BC1S vocabulary.
