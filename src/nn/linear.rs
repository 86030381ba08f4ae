//! Linear layers as 1×1 convolutions.

use std::ops::Range;

use super::{Hidden, Net};
use crate::{
    bail,
    error::{Context, Result},
    graph::In,
    mil::{ValueId, Weight},
};

/// Rows of a weight `[out, in]`, and what happens to them on the way.
#[derive(Debug, Clone)]
pub struct Rows {
    /// Output channels, in the order wanted.
    pub order: Vec<usize>,
    /// Folded into weight and bias.
    pub scale: f32,
}

impl Net<'_> {
    /// `name.weight` `[out, in]` and, where there is one, `name.bias` `[out]`.
    pub fn linear(&mut self, name: &str, x: Hidden) -> Result<Hidden> {
        let weight = self.linear_weight(name)?;
        let bias =
            self.has(&format!("{name}.bias")).then(|| self.source(&format!("{name}.bias"))).transpose()?;
        self.convolve(name, x, &weight, bias.as_ref(), None)
    }

    /// The same where the checkpoint has such a layer; without it, x.
    pub fn linear_if_any(&mut self, name: &str, x: Hidden) -> Result<Hidden> {
        if self.has(&format!("{name}.weight")) { self.linear(name, x) } else { Ok(x) }
    }

    /// Some output channels of a fused linear layer, named `name_part`.
    pub fn linear_rows(&mut self, name: &str, part: &str, rows: Range<usize>, x: Hidden) -> Result<Hidden> {
        self.linear_with(name, part, Rows { order: rows.collect(), scale: 1.0 }, x)
    }

    /// Output channels of a linear layer in any order, scaled; named `name_part`.
    pub fn linear_with(&mut self, name: &str, part: &str, rows: Rows, x: Hidden) -> Result<Hidden> {
        let weight = self.linear_weight(name)?;
        let bias =
            self.has(&format!("{name}.bias")).then(|| self.source(&format!("{name}.bias"))).transpose()?;
        let place = if part.is_empty() { name.to_string() } else { format!("{name}_{part}") };
        self.convolve(&place, x, &weight, bias.as_ref(), Some(rows))
    }

    /// The number of output channels of a linear layer.
    pub fn linear_out(&self, name: &str) -> Result<usize> {
        Ok(self.linear_weight(name)?.shape[0])
    }

    fn linear_weight(&self, name: &str) -> Result<Weight> {
        let weight = self.source(&format!("{name}.weight"))?;
        if weight.shape.len() != 2 {
            bail!("{}.weight: {:?} is no linear layer's [out, in]", self.place(name), weight.shape);
        }
        Ok(weight)
    }

    /// A 1×1 convolution with `weight` `[out, in]` and `bias` `[out]`.
    pub fn convolve(
        &mut self,
        name: &str,
        x: Hidden,
        weight: &Weight,
        bias: Option<&Weight>,
        rows: Option<Rows>,
    ) -> Result<Hidden> {
        let (out, width) = (weight.shape[0], weight.shape[1]);
        if let Some(bias) = bias
            && bias.shape != [out]
        {
            bail!("{}: bias {:?} does not fit weight {:?}", self.place(name), bias.shape, weight.shape);
        }
        let (weight, bias): (Weight, In) = match rows {
            None => (
                self.store(weight, "", [out, width, 1, 1], Ok),
                bias.map(|b| self.store(b, "", [out], Ok)).into(),
            ),
            Some(rows) => {
                if let Some(row) = rows.order.iter().find(|r| **r >= out) {
                    bail!("{}: output channel {row} of {out} is wanted", self.place(name));
                }
                let n = rows.order.len();
                (
                    rows.store(self, weight, width, vec![n, width, 1, 1]),
                    bias.map(|b| rows.store(self, b, 1, vec![n])).into(),
                )
            }
        };
        self.conv(name, x, weight, bias)
    }

    /// The convolution itself: `weight` `[out, in, 1, 1]`, `bias` `[out]`.
    pub(super) fn conv(
        &mut self,
        name: &str,
        x: Hidden,
        weight: Weight,
        bias: impl Into<In>,
    ) -> Result<Hidden> {
        let (width, out) = (weight.shape[1], weight.shape[0]);
        let y = self
            .op(
                "conv",
                name,
                [
                    ("x", x.into()),
                    ("weight", weight.into()),
                    ("bias", bias.into()),
                    ("strides", [1, 1].into()),
                    ("pad_type", "valid".into()),
                    ("pad", [0, 0, 0, 0].into()),
                    ("dilations", [1, 1].into()),
                    ("groups", 1.into()),
                ],
            )
            .within(|| format!("a linear layer {width} → {out} on {:?}", self.builder.shape(x.0)))?;
        Ok(Hidden(y))
    }

    /// Equal shares of the channels.
    pub fn split_channels(
        &mut self,
        name: &str,
        x: ValueId,
        axis: i32,
        parts: usize,
    ) -> Result<Vec<ValueId>> {
        if parts == 1 {
            return Ok(vec![x]);
        }
        let parts = i32::try_from(parts).unwrap_or(i32::MAX);
        self.ops("split", name, [("x", x.into()), ("num_splits", parts.into()), ("axis", axis.into())])
    }

    pub fn concat_channels(&mut self, name: &str, parts: &[ValueId]) -> Result<Hidden> {
        match parts {
            [one] => Ok(Hidden(*one)),
            _ => Ok(Hidden(self.op("concat", name, [("values", parts.into()), ("axis", 1.into())])?)),
        }
    }
}

impl Rows {
    /// `source` `[out, width]` with the rows picked and scaled.
    pub(super) fn store(&self, net: &Net<'_>, source: &Weight, width: usize, shape: Vec<usize>) -> Weight {
        if let (Some(range), true) = (self.contiguous(), self.scale == 1.0) {
            return net.store(&source.rows(range), "", shape, Ok);
        }
        let rows = self.clone();
        let how = match (self.contiguous(), self.scale) {
            (Some(r), scale) => format!("rows {}..{} × {scale}", r.start, r.end),
            (None, scale) => format!("rows {:?} × {scale}", self.order),
        };
        net.store(source, &how, shape, move |all| {
            let row =
                |r: &usize| all.get(r * width..(r + 1) * width).unwrap_or(&[]).iter().map(|v| v * rows.scale);
            Ok(rows.order.iter().flat_map(row).collect())
        })
    }

    fn contiguous(&self) -> Option<Range<usize>> {
        let start = *self.order.first()?;
        self.order.iter().enumerate().all(|(i, r)| *r == start + i).then_some(start..start + self.order.len())
    }
}
