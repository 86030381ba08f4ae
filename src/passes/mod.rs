//! Tidying programs to a fixpoint.
