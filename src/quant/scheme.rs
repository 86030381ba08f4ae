//! Schemes: how a weight is compressed, and the text for it.
//!
//! ```text
//! fp16
//! int8 uint8 int4 uint4   :o zero point searched, :s in the middle   :t one scale, :bN blocks of N inputs
//! lut1 … lut8             :gN outputs a table, :gNi inputs   :vN vectors   :i8 int8 entries   :exact
//! sparse50  2:4           alone, or before one of the above: sparse50+lut4, 2:4+int8
//! w8a8                    int8, and so are the activations that the weight meets
//! ```
//!
//! Signed codes have no zero point unless asked, unsigned ones have a searched one unless asked.

use std::{fmt, str::FromStr};

use crate::{
    bail,
    error::{Context, Error, Result},
};

/// How a weight is stored.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scheme {
    /// As fp16.
    Dense,
    Linear(Linear),
    Palette(Palette),
    Sparse(Sparse, Then),
    /// As `int8`, and what the layer is given goes through 8-bit integers too, with one scale a tensor.
    W8A8,
}

/// What is done with the elements that a sparse scheme keeps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Then {
    Nothing,
    Linear(Linear),
    Palette(Palette),
}

/// Codes times a scale: `scale · (code − offset)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Linear {
    /// 4 or 8.
    pub bits: u8,
    pub signed: bool,
    /// Whether the zero point is searched; unsigned codes without have it in the middle.
    pub offset: bool,
    pub granularity: Granularity,
}

/// What shares one scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Granularity {
    Tensor,
    /// An output channel.
    Channel,
    /// So many inputs of an output channel.
    Block(usize),
}

/// Indices into tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Palette {
    /// 1, 2, 3, 4, 6 or 8; a table has two to this power entries.
    pub bits: u8,
    pub group: Group,
    /// Elements of an entry: 1, or 2 or 4 neighbours along the output axis.
    pub vector: usize,
    /// Whether entries are int8 with one scale a table, and not fp16.
    pub int8: bool,
    pub effort: Effort,
}

/// What shares one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    Tensor,
    Channels { size: usize, axis: Axis },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Axis {
    Output,
    Input,
}

/// How well a table is searched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    /// A good start, improved until it is a local optimum.
    Fast,
    /// The best table there is; only where entries are single fp16 numbers.
    Exact,
}

/// Which elements are kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sparse {
    /// All but so many percent, the smallest magnitudes.
    Percent(f32),
    /// `n` of every `m` neighbours along the input axis, the largest magnitudes.
    Pattern { n: usize, m: usize },
}

const KNOWN: &str = "fp16; int8, uint8, int4, uint4 with `:o`, `:s`, `:t`, `:bN`; lut1, 2, 3, 4, 6, 8 with `:gN`, `:gNi`, \
     `:v2`, `:v4`, `:i8`, `:exact`; sparseP, N:M, alone or before `+`; w8a8";

/// Codes around zero with a scale a channel.
pub(super) const INT8: Linear =
    Linear { bits: 8, signed: true, offset: false, granularity: Granularity::Channel };

impl Linear {
    /// The smallest and the largest code.
    #[inline]
    pub fn range(&self) -> (i32, i32) {
        let half = 1 << (self.bits.clamp(1, 8) - 1);
        if self.signed { (-half, half - 1) } else { (0, 2 * half - 1) }
    }

    /// The zero point where it is not searched.
    pub fn middle(&self) -> i32 {
        if self.signed { 0 } else { 1 << (self.bits.clamp(1, 8) - 1) }
    }

    /// Whether a zero point is stored.
    pub fn has_offset(&self) -> bool {
        self.offset || !self.signed
    }
}

impl Palette {
    /// Entries of a table.
    pub fn entries(&self) -> usize {
        1 << self.bits.min(8)
    }
}

impl Scheme {
    /// The scheme of the weight alone, whatever is done to activations.
    pub fn weights(&self) -> Scheme {
        match *self {
            Scheme::W8A8 => Scheme::Linear(INT8),
            scheme => scheme,
        }
    }

    /// The scheme of the elements themselves, whatever a sparse scheme keeps of them.
    pub fn inner(&self) -> Scheme {
        match *self {
            Scheme::Sparse(_, Then::Nothing) => Scheme::Dense,
            Scheme::Sparse(_, Then::Linear(l)) => Scheme::Linear(l),
            Scheme::Sparse(_, Then::Palette(p)) => Scheme::Palette(p),
            scheme => scheme.weights(),
        }
    }

    /// Refuses what no format holds; `encode` calls it, since a scheme can be made without parsing.
    pub fn check(&self) -> Result<()> {
        if let Scheme::Sparse(sparse, _) = self {
            match *sparse {
                Sparse::Percent(p) if !(p > 0.0 && p < 100.0) => {
                    bail!("`{self}` drops {p} percent"; hint: "a number between 0 and 100, as in `sparse50`")
                }
                Sparse::Pattern { n, m } if n == 0 || n >= m => {
                    bail!("`{self}` keeps {n} of {m}"; hint: "fewer than all and more than none, as in `2:4`")
                }
                _ => {}
            }
        }
        match self.inner() {
            Scheme::Linear(l) if l.bits != 4 && l.bits != 8 => {
                bail!("`{self}` has codes of {} bits, Core ML has 4 and 8", l.bits)
            }
            Scheme::Linear(Linear { granularity: Granularity::Block(0), .. }) => {
                bail!("`{self}` has blocks of 0 inputs")
            }
            Scheme::Palette(p) => p.check(self),
            _ => Ok(()),
        }
    }
}

impl Palette {
    fn check(&self, whole: &Scheme) -> Result<()> {
        if ![1, 2, 3, 4, 6, 8].contains(&self.bits) {
            bail!("`{whole}` has indices of {} bits, Core ML has 1, 2, 3, 4, 6 and 8", self.bits);
        }
        if ![1, 2, 4].contains(&self.vector) {
            bail!("`{whole}` has vectors of {}, they can be of 1, 2 and 4", self.vector);
        }
        if let Group::Channels { size, axis } = self.group {
            if size == 0 {
                bail!("`{whole}` has groups of 0 channels");
            }
            if axis == Axis::Output && size % self.vector != 0 {
                bail!(
                    "`{whole}` has groups of {size} outputs, which vectors of {} do not divide",
                    self.vector
                );
            }
        }
        let single = self.vector == 1;
        if self.effort == Effort::Exact && (!single || self.int8) {
            bail!("`{whole}`: only tables of single fp16 numbers can be exact"; hint: "leave out `:exact`");
        }
        if matches!(whole, Scheme::Sparse(..)) && !single {
            bail!("`{whole}`: a sparse weight has no vectors"; hint: "leave out `:v{}`", self.vector);
        }
        Ok(())
    }
}

impl FromStr for Scheme {
    type Err = Error;

    fn from_str(text: &str) -> Result<Scheme> {
        let unknown = || Error::new(format!("`{text}` is no scheme")).hint(KNOWN);
        let scheme = match text.split_once('+') {
            Some((sparse, then)) => {
                let sparse = sparse_of(sparse).ok_or_else(unknown)?;
                let then = match plain(then).at(text)?.ok_or_else(unknown)? {
                    Scheme::Dense => Then::Nothing,
                    Scheme::Linear(l) => Then::Linear(l),
                    Scheme::Palette(p) => Then::Palette(p),
                    Scheme::Sparse(..) | Scheme::W8A8 => return Err(unknown()),
                };
                Scheme::Sparse(sparse, then)
            }
            None => match sparse_of(text) {
                Some(sparse) => Scheme::Sparse(sparse, Then::Nothing),
                None => plain(text).at(text)?.ok_or_else(unknown)?,
            },
        };
        scheme.check()?;
        Ok(scheme)
    }
}

/// Digits and nothing else, so that every number has few spellings.
fn number(text: &str) -> Option<usize> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}

fn sparse_of(text: &str) -> Option<Sparse> {
    if let Some(percent) = text.strip_prefix("sparse") {
        let plain = percent.bytes().all(|b| b.is_ascii_digit() || b == b'.');
        return plain.then(|| percent.parse().ok()).flatten().map(Sparse::Percent);
    }
    let (n, m) = text.split_once(':')?;
    Some(Sparse::Pattern { n: number(n)?, m: number(m)? })
}

/// A scheme without a sparse part; `None` where the first word is unknown.
fn plain(text: &str) -> Result<Option<Scheme>> {
    let mut words = text.split(':');
    let name = words.next().unwrap_or_default();
    let words: Vec<&str> = words.collect();
    if let Some(twice) = words.iter().enumerate().find(|(i, w)| words[..*i].contains(w)) {
        bail!("`:{}` is given twice", twice.1);
    }
    if name == "fp16" && words.is_empty() {
        return Ok(Some(Scheme::Dense));
    }
    if name == "w8a8" && words.is_empty() {
        return Ok(Some(Scheme::W8A8));
    }
    if let Some(bits) = name.strip_prefix("lut").and_then(number) {
        return palette(u8::try_from(bits).unwrap_or(u8::MAX), &words).map(Some);
    }
    let (signed, bits) = match name {
        "int8" => (true, 8),
        "uint8" => (false, 8),
        "int4" => (true, 4),
        "uint4" => (false, 4),
        _ => return Ok(None),
    };
    let mut linear = Linear { bits, signed, offset: !signed, granularity: Granularity::Channel };
    let mut seen = (false, false);
    for word in words {
        let set = match word {
            "o" | "s" => {
                linear.offset = word == "o";
                &mut seen.0
            }
            _ => {
                linear.granularity = match word.strip_prefix('b').and_then(number) {
                    Some(size) => Granularity::Block(size),
                    None if word == "t" => Granularity::Tensor,
                    None => {
                        bail!("`:{word}` says nothing of `{name}`"; hint: "`:o`, `:s`, `:t` and `:bN` do")
                    }
                };
                &mut seen.1
            }
        };
        if std::mem::replace(set, true) {
            bail!("`:{word}` contradicts what is before it");
        }
    }
    Ok(Some(Scheme::Linear(linear)))
}

fn palette(bits: u8, words: &[&str]) -> Result<Scheme> {
    let mut p = Palette { bits, group: Group::Tensor, vector: 1, int8: false, effort: Effort::Fast };
    let (mut grouped, mut vectors) = (false, false);
    for word in words {
        let again = if *word == "i8" {
            std::mem::replace(&mut p.int8, true)
        } else if *word == "exact" {
            std::mem::replace(&mut p.effort, Effort::Exact) == Effort::Exact
        } else if let Some(size) = word.strip_prefix('v').and_then(number) {
            p.vector = size;
            std::mem::replace(&mut vectors, true)
        } else if let Some(size) = word.strip_prefix('g') {
            let (size, axis) =
                size.strip_suffix('i').map_or((size, Axis::Output), |size| (size, Axis::Input));
            let Some(size) = number(size) else { bail!("`:{word}` has no number of channels") };
            p.group = Group::Channels { size, axis };
            std::mem::replace(&mut grouped, true)
        } else {
            bail!("`:{word}` says nothing of `lut{bits}`"; hint: "`:gN`, `:gNi`, `:v2`, `:v4`, `:i8` and `:exact` do");
        };
        if again {
            bail!("`:{word}` contradicts what is before it");
        }
    }
    Ok(Scheme::Palette(p))
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scheme::Dense => f.write_str("fp16"),
            Scheme::W8A8 => f.write_str("w8a8"),
            Scheme::Linear(l) => l.fmt(f),
            Scheme::Palette(p) => p.fmt(f),
            Scheme::Sparse(s, then) => {
                s.fmt(f)?;
                match then {
                    Then::Nothing => Ok(()),
                    Then::Linear(l) => write!(f, "+{l}"),
                    Then::Palette(p) => write!(f, "+{p}"),
                }
            }
        }
    }
}

impl fmt::Display for Linear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}int{}", if self.signed { "" } else { "u" }, self.bits)?;
        match (self.signed, self.offset) {
            (true, true) => f.write_str(":o")?,
            (false, false) => f.write_str(":s")?,
            _ => {}
        }
        match self.granularity {
            Granularity::Tensor => f.write_str(":t"),
            Granularity::Channel => Ok(()),
            Granularity::Block(size) => write!(f, ":b{size}"),
        }
    }
}

impl fmt::Display for Palette {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lut{}", self.bits)?;
        if let Group::Channels { size, axis } = self.group {
            write!(f, ":g{size}{}", if axis == Axis::Input { "i" } else { "" })?;
        }
        if self.vector != 1 {
            write!(f, ":v{}", self.vector)?;
        }
        if self.int8 {
            f.write_str(":i8")?;
        }
        if self.effort == Effort::Exact {
            f.write_str(":exact")?;
        }
        Ok(())
    }
}

impl fmt::Display for Sparse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Sparse::Percent(p) => write!(f, "sparse{p}"),
            Sparse::Pattern { n, m } => write!(f, "{n}:{m}"),
        }
    }
}
