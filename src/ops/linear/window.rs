//! Kernels sliding over an image: sizes, padding, and which input each tap reads.

use std::ops::Range;

use crate::{
    bail,
    error::Result,
    mil::{Dim, types::shape_text},
    ops::{Args, Call},
};

/// How a kernel moves along every spatial axis.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Window {
    pub kernel: Vec<usize>,
    pub strides: Vec<usize>,
    pub dilations: Vec<usize>,
    pub padding: Padding,
    /// Keep a last window that is not quite full.
    pub ceil: bool,
}

#[derive(Debug, Clone)]
pub(in crate::ops) enum Padding {
    Valid,
    /// Before and after each axis.
    Custom(Vec<(usize, usize)>),
    /// As much as makes the result `size / stride`; what is odd goes after, or before.
    Same {
        lower: bool,
    },
}

/// The parameters of a window, wherever they come from.
pub(in crate::ops) trait Source {
    fn ints(&self, name: &str) -> Result<Option<Vec<i64>>>;
    fn text(&self, name: &str) -> String;
}

impl Source for Args<'_> {
    fn ints(&self, name: &str) -> Result<Option<Vec<i64>>> {
        match self.ints(name)? {
            None if self.has(name) => bail!("`{name}` must be known when the program is compiled"),
            known => Ok(known),
        }
    }

    fn text(&self, name: &str) -> String {
        self.str_or(name, "valid").to_ascii_lowercase()
    }
}

impl Source for Call<'_> {
    fn ints(&self, name: &str) -> Result<Option<Vec<i64>>> {
        if self.has(name) { self.ints(name).map(Some) } else { Ok(None) }
    }

    fn text(&self, name: &str) -> String {
        self.str_or(name, "valid").to_ascii_lowercase()
    }
}

impl Window {
    pub(in crate::ops) fn read(from: &impl Source, kernel: Vec<usize>) -> Result<Window> {
        let n = kernel.len();
        if n == 0 || n > 3 {
            bail!("{n} spatial axes, 1 to 3 are expected");
        }
        if kernel.contains(&0) {
            bail!("a kernel of size {} is empty", shape_text(&kernel));
        }
        let steps = |name| {
            let v = from.ints(name)?.unwrap_or_else(|| vec![1; n]);
            let v = numbers(&v, name, n)?;
            if v.contains(&0) {
                bail!("`{name}` {} has a zero", shape_text(&v))
            }
            Ok(v)
        };
        let padding = match from.text("pad_type").as_str() {
            "valid" => Padding::Valid,
            "same" => Padding::Same { lower: false },
            "same_lower" => Padding::Same { lower: true },
            "custom" => {
                let pad = from.ints("pad")?.unwrap_or_else(|| vec![0; 2 * n]);
                Padding::Custom(numbers(&pad, "pad", 2 * n)?.chunks(2).map(|p| (p[0], p[1])).collect())
            }
            other => {
                bail!("`pad_type` is `{other}`"; hint: "valid, custom, same and same_lower are possible")
            }
        };
        Ok(Window {
            kernel,
            strides: steps("strides")?,
            dilations: steps("dilations")?,
            padding,
            ceil: false,
        })
    }

    /// Elements from the first tap to the last.
    pub(in crate::ops) fn reach(&self, i: usize) -> Result<usize> {
        let reach = (self.kernel[i] - 1).checked_mul(self.dilations[i]).and_then(|r| r.checked_add(1));
        reach.map_or_else(|| bail!("a kernel that reaches too far"), Ok)
    }

    /// Padding before and after axis `i` of that size.
    pub(in crate::ops) fn pads(&self, i: usize, size: usize) -> Result<(usize, usize)> {
        Ok(match &self.padding {
            Padding::Valid => (0, 0),
            Padding::Custom(pads) => pads[i],
            Padding::Same { lower } => {
                let spanned =
                    size.div_ceil(self.strides[i]).saturating_sub(1).saturating_mul(self.strides[i]);
                let total = spanned.saturating_add(self.reach(i)?).saturating_sub(size);
                let less = total / 2;
                if *lower { (total - less, less) } else { (less, total - less) }
            }
        })
    }

    /// Positions of the kernel along axis `i` of that size.
    pub(in crate::ops) fn positions(&self, i: usize, size: usize) -> Result<usize> {
        let (before, after) = self.pads(i, size)?;
        let padded = size.checked_add(before).and_then(|s| s.checked_add(after));
        let reach = self.reach(i)?;
        let Some(room) = padded.and_then(|p| p.checked_sub(reach)) else {
            bail!(
                "a kernel that reaches over {reach} does not fit axis {} of size {size}, padded by {before} and {after}",
                i + 2
            );
        };
        let stride = self.strides[i];
        let count = if self.ceil { room.div_ceil(stride) + 1 } else { room / stride + 1 };
        // With padding, Core ML drops a last window that would start after the input.
        let idle = self.ceil
            && before + after > 0
            && (count - 1).saturating_mul(stride) >= size.saturating_add(before);
        Ok(if idle { count - 1 } else { count })
    }

    /// The same for sizes that may be unknown.
    pub(in crate::ops) fn spatial(&self, dims: &[Dim]) -> Result<Vec<Dim>> {
        if dims.len() != self.kernel.len() {
            bail!(
                "{} spatial axes, the kernel {} has {}",
                dims.len(),
                shape_text(&self.kernel),
                self.kernel.len()
            );
        }
        let size = |(i, d): (usize, &Dim)| match d {
            Dim::Fixed(n) => self.positions(i, *n).map(Dim::Fixed),
            unknown => Ok(*unknown),
        };
        dims.iter().enumerate().map(size).collect()
    }

    /// The window over tensors of these spatial sizes.
    pub(in crate::ops) fn plan(&self, sizes: &[usize]) -> Result<Plan> {
        if sizes.len() != self.kernel.len() {
            bail!(
                "{} spatial axes, the kernel {} has {}",
                sizes.len(),
                shape_text(&self.kernel),
                self.kernel.len()
            );
        }
        let n = sizes.len();
        let outs = (0..n).map(|i| self.positions(i, sizes[i])).collect::<Result<Vec<_>>>()?;
        let before = (0..n).map(|i| Ok(self.pads(i, sizes[i])?.0)).collect::<Result<Vec<_>>>()?;
        Plan::new(self, sizes, &outs, &before)
    }
}

/// A window over three axes of known sizes.
#[derive(Debug, Clone)]
pub(in crate::ops) struct Plan {
    pub size: [usize; 3],
    pub out: [usize; 3],
    pub kernel: [usize; 3],
    pub stride: [usize; 3],
    pub dilation: [usize; 3],
    pub before: [usize; 3],
}

/// The most elements that a tensor is given room for.
pub(in crate::ops) const MOST: usize = 1 << 30;
/// The most taps that a kernel can have.
const TAPS: usize = 1 << 24;

impl Plan {
    /// Missing axes become axes of one element in front.
    pub(in crate::ops) fn new(w: &Window, size: &[usize], out: &[usize], before: &[usize]) -> Result<Plan> {
        for (sizes, most) in [(size, MOST), (out, MOST), (w.kernel.as_slice(), TAPS)] {
            if sizes.iter().try_fold(1usize, |n, s| n.checked_mul(*s)).is_none_or(|n| n > most) {
                bail!("{} elements are too many", shape_text(sizes));
            }
        }
        let three = |v: &[usize], missing| {
            let mut all = [missing; 3];
            all[3 - v.len()..].copy_from_slice(v);
            all
        };
        Ok(Plan {
            size: three(size, 1),
            out: three(out, 1),
            kernel: three(&w.kernel, 1),
            stride: three(&w.strides, 1),
            dilation: three(&w.dilations, 1),
            before: three(before, 0),
        })
    }

    pub(in crate::ops) fn taps(&self) -> usize {
        self.kernel.iter().product()
    }

    /// The input index on an axis that tap `k` of window `o` reads; `None` in the padding.
    pub(in crate::ops) fn source(&self, axis: usize, o: usize, k: usize) -> Option<usize> {
        let at = (o * self.stride[axis] + k * self.dilation[axis]).checked_sub(self.before[axis])?;
        (at < self.size[axis]).then_some(at)
    }

    /// Calls `f(position, input index)` for every position in the lines where the tap reads an element; a
    /// line is the last axis of the result.
    pub(in crate::ops) fn each(&self, tap: usize, lines: Range<usize>, mut f: impl FnMut(usize, usize)) {
        let [_, kh, kw] = self.kernel;
        let (kz, ky, kx) = (tap / (kh * kw), tap / kw % kh, tap % kw);
        // Along the last axis the windows that read an element are a range.
        let (shift, stride, before) = (kx * self.dilation[2], self.stride[2], self.before[2]);
        let first = before.saturating_sub(shift).div_ceil(stride);
        let end = (self.size[2] + before).saturating_sub(shift).div_ceil(stride).min(self.out[2]);
        for line in lines {
            let Some(sz) = self.source(0, line / self.out[1], kz) else { continue };
            let Some(sy) = self.source(1, line % self.out[1], ky) else { continue };
            let (to, from) = (line * self.out[2], (sz * self.size[1] + sy) * self.size[2]);
            for x in first..end {
                f(to + x, from + x * stride + shift - before);
            }
        }
    }

    /// Lines of the result.
    pub(in crate::ops) fn lines(&self) -> usize {
        self.out[0] * self.out[1]
    }
}

/// Exactly `count` numbers, none below zero.
pub(in crate::ops) fn numbers(v: &[i64], name: &str, count: usize) -> Result<Vec<usize>> {
    if v.len() != count {
        bail!("`{name}` has {} entries, {count} are expected", v.len());
    }
    v.iter()
        .map(|n| usize::try_from(*n).ok().filter(|n| *n <= 1 << 32))
        .collect::<Option<_>>()
        .map_or_else(|| bail!("`{name}` {} is out of range", shape_text(v)), Ok)
}
