//! The one error type: a message that names the place and the numbers, the trail of what was being
//! done (outermost first), and the way out.

use std::fmt;

pub type Result<T, E = Error> = std::result::Result<T, E>;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    inner: Box<Inner>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Inner {
    message: String,
    trail: Vec<String>,
    hint: Option<String>,
}

impl Error {
    pub fn new(message: impl Into<String>) -> Self {
        Self { inner: Box::new(Inner { message: message.into(), trail: Vec::new(), hint: None }) }
    }

    /// Adds the place in front of the message: `place: message`.
    #[must_use]
    pub fn at(mut self, place: impl fmt::Display) -> Self {
        self.inner.message = format!("{place}: {}", self.inner.message);
        self
    }

    /// Adds what was being done when it happened; call from the inside out.
    #[must_use]
    pub fn within(mut self, doing: impl Into<String>) -> Self {
        self.inner.trail.insert(0, doing.into());
        self
    }

    /// Sets the way out, unless a hint nearer to the cause is there already.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.inner.hint.get_or_insert_with(|| hint.into());
        self
    }

    pub fn message(&self) -> &str {
        &self.inner.message
    }

    pub fn trail(&self) -> &[String] {
        &self.inner.trail
    }

    pub fn way_out(&self) -> Option<&str> {
        self.inner.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.inner.message)?;
        for step in &self.inner.trail {
            write!(f, "\n  {step}")?;
        }
        if let Some(hint) = &self.inner.hint {
            write!(f, "\n  hint: {hint}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Error {}

impl From<candle_core::Error> for Error {
    fn from(e: candle_core::Error) -> Self {
        // Only the first line: candle appends a backtrace when one is enabled.
        Error::new(e.to_string().lines().next().unwrap_or("tensor error").to_string())
    }
}

/// Adds place, trail or hint to the error of a `Result`.
pub trait Context<T> {
    fn at(self, place: impl fmt::Display) -> Result<T>;
    fn within(self, doing: impl FnOnce() -> String) -> Result<T>;
    fn hint(self, hint: impl FnOnce() -> String) -> Result<T>;
}

impl<T, E: Into<Error>> Context<T> for Result<T, E> {
    fn at(self, place: impl fmt::Display) -> Result<T> {
        self.map_err(|e| e.into().at(place))
    }
    fn within(self, doing: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| e.into().within(doing()))
    }
    fn hint(self, hint: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|e| e.into().hint(hint()))
    }
}

/// An I/O error with the file it happened on.
pub fn io(path: &std::path::Path, e: &std::io::Error) -> Error {
    Error::new(format!("{}: {e}", path.display()))
}

/// Returns an error: `bail!("conv: {x} channels, weight takes {y}"; hint: "…")`.
#[macro_export]
macro_rules! bail {
    ($fmt:literal $(, $arg:expr)* $(,)? ; hint: $($hint:tt)+) => {
        return Err($crate::error::Error::new(format!($fmt $(, $arg)*)).hint(format!($($hint)+)))
    };
    ($($arg:tt)+) => { return Err($crate::error::Error::new(format!($($arg)+))) };
}
