//! What the hardware does with a scheme, as far as it has been published: a scheme that is known to run
//! badly on the target is refused with the reason, unless that is wanted.

use std::{fmt, str::FromStr};

use super::{
    scheme::{Axis, Granularity, Group, Palette, Scheme, Then},
    uses::Role,
};
use crate::{
    bail,
    error::{Error, Result},
    ops::Opset,
};

/// What the package is to run well on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Target {
    /// The Apple Neural Engine.
    #[default]
    Ane,
    Gpu,
    All,
}

impl Target {
    pub const ALL: [Target; 3] = [Target::Ane, Target::Gpu, Target::All];

    pub fn name(self) -> &'static str {
        ["ane", "gpu", "all"][self as usize]
    }

    /// The scheme when none is asked for.
    pub fn default_scheme(self, opset: Opset) -> Result<Scheme> {
        match self {
            _ if opset < Opset::Ios18 => "int8",
            Target::Ane => "lut4:g16",
            Target::Gpu => "int4:b32",
            Target::All => "int8",
        }
        .parse()
    }

    /// Refuses a scheme that is known to be slow or wrong on the target.
    pub(super) fn refuse(self, scheme: &Scheme) -> Result<()> {
        if self == Target::Gpu {
            return Ok(());
        }
        match slow_on_ane(scheme) {
            None => Ok(()),
            Some((why, instead)) => Err(Error::new(format!("`{scheme}` on target `{self}`: {why}"))
                .hint(format!("{instead}; `--target gpu` and `--allow-slow` take it all the same"))),
        }
    }

    /// Why one weight stays as it is although its scheme is fine elsewhere.
    pub(super) fn spares(self, scheme: &Scheme, role: &Role) -> Option<String> {
        let palette = matches!(scheme, Scheme::Palette(_) | Scheme::Sparse(_, Then::Palette(_)));
        (self != Target::Gpu && palette && role.stride > 2).then(|| {
            format!(
                "a convolution of stride {}; the Neural Engine takes palettes up to stride 2",
                role.stride
            )
        })
    }

    /// What is worth knowing of a scheme that is taken.
    pub(super) fn note(self, scheme: &Scheme) -> Option<String> {
        let about = match scheme {
            _ if self == Target::Gpu => return None,
            Scheme::W8A8 => {
                "8-bit activations gain time from the A17 Pro and the M4 on, most in deep convolutional models; language models of this kind have been seen to be refused by the Neural Engine"
            }
            Scheme::Linear(l) if l.bits == 4 => {
                "4-bit integers with a scale per channel lose much without training; palettes of 4 bits lose less"
            }
            Scheme::Palette(Palette { group: Group::Channels { size, .. }, .. }) if *size < 8 => {
                "tables for fewer than 8 channels cost time on the Neural Engine"
            }
            Scheme::Sparse(..) => {
                "the Neural Engine gains time from zeros only where 75 % are zero, or pairs are"
            }
            _ => return None,
        };
        Some(format!("`{scheme}`: {about}"))
    }
}

/// Why, and what to take instead.
fn slow_on_ane(scheme: &Scheme) -> Option<(&'static str, &'static str)> {
    const JOINT: &str = "the Neural Engine has been seen to leave such weights to other units";
    let palette = |p: &Palette| match p.group {
        _ if p.vector > 1 => Some((
            "the Neural Engine has been seen to refuse palettes of vectors",
            "a palette of single values, such as `lut4:g16`, is what it takes",
        )),
        _ if p.int8 => Some((JOINT, "leave out `:i8`")),
        Group::Channels { size: 1, .. } => Some((
            "a table per channel took 59 ms where one per 8 channels took 15 ms (a model of 1.3 billion weights on an A17 Pro)",
            "8, 16 or 32 channels a table are fast",
        )),
        Group::Channels { size: 2, .. } => Some((
            "a table per 2 channels took 31 ms where one per 8 channels took 15 ms (a model of 1.3 billion weights on an A17 Pro)",
            "8, 16 or 32 channels a table are fast",
        )),
        Group::Tensor | Group::Channels { axis: Axis::Output | Axis::Input, .. } => None,
    };
    let blocks = |g: &Granularity| {
        matches!(g, Granularity::Block(_)).then_some((
            "the Neural Engine takes scales per tensor and per output channel; with blocks it has been seen to fail, to fall back, and to compute something else",
            "`int8` has a scale per channel, `lut4:g16` has four bits",
        ))
    };
    match scheme {
        Scheme::Dense | Scheme::W8A8 | Scheme::Sparse(_, Then::Nothing) => None,
        Scheme::Linear(l) => blocks(&l.granularity),
        Scheme::Palette(p) => palette(p),
        Scheme::Sparse(_, Then::Linear(l)) => blocks(&l.granularity),
        Scheme::Sparse(_, Then::Palette(p)) => {
            palette(p).or(Some((JOINT, "either zeros or a palette is taken, not both")))
        }
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Target {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match Target::ALL.into_iter().find(|t| t.name() == text) {
            Some(target) => Ok(target),
            None => bail!("`{text}` is no target; ane, gpu and all are"),
        }
    }
}
