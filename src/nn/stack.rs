//! Several linear layers as one convolution: their rows stacked, in any order, scaled, and padded with
//! zero rows.

use super::{Hidden, Net};
use crate::{bail, error::Result, mil::Weight};

/// Rows of one linear layer, by the checkpoint's name.
#[derive(Debug, Clone)]
pub struct Projection {
    pub weight: Weight,
    pub bias: Option<Weight>,
    /// Output channels in the order wanted; `None` is a row of zeros.
    pub rows: Vec<Option<usize>>,
    /// Folded into weight and bias.
    pub scale: f32,
}

impl Net<'_> {
    /// All output channels of a linear layer.
    pub fn projection(&self, name: &str) -> Result<Projection> {
        let (weight, bias) = self.layer_weights(name)?;
        let rows = (0..weight.shape[0]).map(Some).collect();
        Ok(Projection { weight, bias, rows, scale: 1.0 })
    }

    /// Weight `[out, in]` and bias of a linear layer; GPT-2's are stored `[in, out]` and turned.
    fn layer_weights(&self, name: &str) -> Result<(Weight, Option<Weight>)> {
        let weight = self.source(&format!("{name}.weight"))?;
        let [a, b] = weight.shape[..] else {
            bail!("{}.weight: {:?} is no linear layer's [out, in]", self.place(name), weight.shape);
        };
        let bias_name = format!("{name}.bias");
        let bias = self.has(&bias_name).then(|| self.source(&bias_name)).transpose()?;
        if !self.transposed_linears {
            return Ok((weight, bias));
        }
        let turned = weight.map("transposed", crate::mil::DType::F32, [b, a], move |v| {
            Ok((0..b)
                .flat_map(|o| (0..a).map(move |i| i * b + o))
                .filter_map(|i| v.get(i).copied())
                .collect())
        });
        Ok((turned, bias))
    }

    /// One convolution whose output channels are those of all `parts` in turn.
    pub fn stacked(&mut self, name: &str, parts: &[Projection], x: Hidden) -> Result<Hidden> {
        let width = parts.first().map_or(0, |p| p.weight.shape[1]);
        let out: usize = parts.iter().map(|p| p.rows.len()).sum();
        let key = |w: &str, p: &Projection| format!("{w} rows {} × {}", runs(&p.rows), p.scale);
        let keys: Vec<String> = parts.iter().map(|p| key(&p.weight.key, p)).collect();
        for p in parts {
            let rows = p.weight.shape[0];
            if p.weight.shape[1] != width || p.rows.iter().flatten().any(|r| *r >= rows) {
                bail!(
                    "{}: {:?} does not have the rows and the width {width} wanted",
                    self.place(name),
                    p.weight.shape
                );
            }
        }
        let (owned, float) = (parts.to_vec(), self.float);
        let weight =
            Weight::new(format!("{} {float}", keys.join(" & ")), float, [out, width, 1, 1], move || {
                let mut all = Vec::with_capacity(out * width);
                for p in &owned {
                    p.append(&p.weight.floats()?, width, &mut all);
                }
                Ok(crate::mil::constant::encode_floats(float, &all)?.into())
            });
        let biased = parts.iter().any(|p| p.bias.is_some());
        let owned = parts.to_vec();
        let bias = biased.then(|| {
            let keys: Vec<String> =
                parts.iter().map(|p| key(p.bias.as_ref().map_or("0", |b| b.key.as_str()), p)).collect();
            Weight::new(format!("{} {float}", keys.join(" & ")), float, [out], move || {
                let mut all = Vec::with_capacity(out);
                for p in &owned {
                    match &p.bias {
                        Some(b) => p.append(&b.floats()?, 1, &mut all),
                        None => all.extend(p.rows.iter().map(|_| 0.0)),
                    }
                }
                Ok(crate::mil::constant::encode_floats(float, &all)?.into())
            })
        });
        self.conv(name, x, weight, bias)
    }
}

impl Projection {
    /// Only the given rows, in their order.
    #[must_use]
    pub fn take(mut self, rows: impl IntoIterator<Item = usize>) -> Self {
        self.rows = rows.into_iter().map(|r| self.rows.get(r).copied().flatten()).collect();
        self
    }

    #[must_use]
    pub fn scaled(mut self, by: f32) -> Self {
        self.scale *= by;
        self
    }

    fn append(&self, from: &[f32], width: usize, to: &mut Vec<f32>) {
        for row in &self.rows {
            match row {
                Some(r) => to.extend(from.iter().skip(r * width).take(width).map(|v| v * self.scale)),
                None => to.extend(std::iter::repeat_n(0.0, width)),
            }
        }
    }
}

/// `0..64 - 96..160`: runs of rows that follow each other, `-` for zero rows.
fn runs(rows: &[Option<usize>]) -> String {
    let mut text = String::new();
    let mut i = 0;
    while i < rows.len() {
        let start = i;
        i += 1;
        match rows[start] {
            None => {
                while i < rows.len() && rows[i].is_none() {
                    i += 1;
                }
                text.push_str(&format!("-{} ", i - start));
            }
            Some(first) => {
                while i < rows.len() && rows[i] == Some(first + (i - start)) {
                    i += 1;
                }
                text.push_str(&format!("{first}..{} ", first + (i - start)));
            }
        }
    }
    text
}
