//! The outside format: packages on disk, read and written.
