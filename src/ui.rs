//! The one place that prints: data on stdout, talk on stderr.
