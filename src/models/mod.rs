//! Families of architectures.
