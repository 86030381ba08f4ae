//! From an activation to what a host reads.

use super::{Hidden, Net};
use crate::{bail, error::Result, graph::In, mil::ValueId};

/// The widest layer that every Neural Engine takes in one piece.
pub const WIDEST: usize = 16384;

impl Net<'_> {
    /// The first token's column, `[B, C, 1, 1]`.
    pub fn first_token(&mut self, name: &str, x: Hidden) -> Result<Hidden> {
        let size: Vec<i32> = self.builder.shape(x.0)?[..3]
            .iter()
            .map(|d| i32::try_from(*d).unwrap_or(i32::MAX))
            .chain([1])
            .collect();
        let params = [("x", x.into()), ("begin", [0, 0, 0, 0].into()), ("size", In::from(size.as_slice()))];
        Ok(Hidden(self.op("slice_by_size", name, params)?))
    }

    /// The last token's column, `[B, C, 1, 1]`.
    pub fn last_token(&mut self, name: &str, x: Hidden) -> Result<Hidden> {
        let channels = self.channels(x)?;
        let begin = [0, 0, 0, self.tokens - 1];
        Ok(Hidden(self.slice(name, x.0, &begin, &[self.batch, channels, 1, 1])?))
    }

    /// `[1, V, 1, T]` → `[1, T, V]`, as an output.
    pub fn token_logits(&mut self, output: &str, x: Hidden) -> Result<ValueId> {
        let shape = self.builder.shape(x.0)?;
        if shape[3] > 1 {
            return self.per_token(output, x);
        }
        let y = self.reshape(&format!("{output}_row"), x.0, &[1, 1, shape[1]])?;
        self.output(output, y)
    }

    /// Hidden states as an output.
    pub fn hidden_output(&mut self, output: &str, x: Hidden) -> Result<ValueId> {
        self.output(output, x.0)
    }

    /// The mean of the real tokens, `[B, C, 1, 1]`; zero where there is none.
    pub fn mean_of_tokens(&mut self, name: &str, x: Hidden, token_weights: ValueId) -> Result<Hidden> {
        let (axes, keep) = (("axes", In::from([3])), ("keep_dims", In::from(true)));
        let count = self.op(
            "reduce_sum",
            &format!("{name}_count"),
            [("x", token_weights.into()), axes.clone(), keep.clone()],
        )?;
        let count = self.binary("maximum", &format!("{name}_count_or_one"), count, self.scalar(1.0))?;
        // Dividing first keeps the sum within fp16, however long the sequence is.
        let share = self.binary("real_div", &format!("{name}_share"), token_weights, count)?;
        let parts = self.binary("mul", &format!("{name}_parts"), x.0, share)?;
        Ok(Hidden(self.op("reduce_sum", name, [("x", parts.into()), axes, keep])?))
    }

    /// The largest value of the real tokens, `[B, C, 1, 1]`.
    pub fn max_of_tokens(&mut self, name: &str, x: Hidden, token_weights: ValueId) -> Result<Hidden> {
        let padding = self.binary("sub", &format!("{name}_padding"), token_weights, self.scalar(1.0))?;
        let blocked =
            self.binary("mul", &format!("{name}_blocked"), padding, self.scalar(-super::attention::BLOCKED))?;
        let masked = self.binary("add", &format!("{name}_masked"), x.0, blocked)?;
        let params = [("x", masked.into()), ("axes", [3].into()), ("keep_dims", true.into())];
        Ok(Hidden(self.op("reduce_max", name, params)?))
    }

    /// x / ‖x‖ over the channels; scaled by the largest magnitude first, so that no square overflows or
    /// vanishes in fp16. A zero vector stays zero.
    pub fn unit_length(&mut self, name: &str, x: Hidden) -> Result<Hidden> {
        let (axes, keep) = (("axes", In::from([1])), ("keep_dims", In::from(true)));
        let size = self.op("abs", &format!("{name}_abs"), [("x", x.into())])?;
        let largest = self.op(
            "reduce_max",
            &format!("{name}_largest"),
            [("x", size.into()), axes.clone(), keep.clone()],
        )?;
        let largest =
            self.binary("maximum", &format!("{name}_above_zero"), largest, self.scalar(6.103_515_6e-5))?;
        let scaled = self.binary("real_div", &format!("{name}_scaled"), x.0, largest)?;
        let sum =
            self.op("reduce_sum_square", &format!("{name}_square"), [("x", scaled.into()), axes, keep])?;
        let inverse = self.op(
            "rsqrt",
            &format!("{name}_inverse"),
            [("x", sum.into()), ("epsilon", self.epsilon(0.0))],
        )?;
        Ok(Hidden(self.binary("mul", name, scaled, inverse)?))
    }

    /// The projection to the vocabulary: `name.weight`, or `tied` where the checkpoint has none and its
    /// config allows it, with `bias` where it has one.
    pub fn tied_vocabulary(&mut self, name: &str, bias: &str, tied: &str, x: Hidden) -> Result<Hidden> {
        let own = format!("{name}.weight");
        let may_tie = self.checkpoint.config.bool_or(&["tie_word_embeddings"], true)?;
        if !self.has(&own) && !may_tie {
            bail!("the checkpoint has no tensor `{}`", self.place(&own); hint: "config.json says `tie_word_embeddings: false`, so the embedding cannot stand in for it");
        }
        let table = if self.has(&own) { own } else { tied.to_string() };
        let own_bias = format!("{name}.bias");
        let bias = [bias, own_bias.as_str()].into_iter().find(|b| self.has(b));
        self.vocabulary(name, &table, bias, x)
    }

    /// The projection to the vocabulary; `table` may be the embedding's, of which the same bytes are stored
    /// once where both are in the same pieces.
    pub fn vocabulary(&mut self, name: &str, table: &str, bias: Option<&str>, x: Hidden) -> Result<Hidden> {
        let parts: Vec<ValueId> =
            self.vocabulary_pieces(name, table, bias, x)?.iter().map(|piece| piece.0).collect();
        self.concat_channels(&format!("{name}_all"), &parts)
    }

    /// The projection to the vocabulary in pieces of at most [`WIDEST`] rows, in order.
    pub fn vocabulary_pieces(
        &mut self,
        name: &str,
        table: &str,
        bias: Option<&str>,
        x: Hidden,
    ) -> Result<Vec<Hidden>> {
        let weight = self.source(table)?;
        let bias = bias.map(|b| self.source(b)).transpose()?;
        let rows = weight.shape.first().copied().unwrap_or(0);
        let pieces = rows.div_ceil(WIDEST).max(1);
        let mut parts = Vec::with_capacity(pieces);
        for piece in 0..pieces {
            let order: Vec<usize> = (piece * WIDEST..rows.min((piece + 1) * WIDEST)).collect();
            let part = (pieces > 1).then_some(super::linear::Rows { order, scale: 1.0 });
            parts.push(self.convolve(name, x, &weight, bias.as_ref(), part)?);
        }
        Ok(parts)
    }

    /// `[B, C, 1, S]` → `[B, S, C]`, as an output.
    pub fn per_token(&mut self, output: &str, x: Hidden) -> Result<ValueId> {
        let x = self.op("squeeze", &format!("{output}_rows"), [("x", x.into()), ("axes", [2].into())])?;
        let y = self.op(
            "transpose",
            &format!("{output}_transpose"),
            [("x", x.into()), ("perm", [0, 2, 1].into())],
        )?;
        self.output(output, y)
    }

    /// `[B, C, 1, 1]` → `[B, C]`, as an output.
    pub fn per_row(&mut self, output: &str, x: Hidden) -> Result<ValueId> {
        let y = self.op("squeeze", &format!("{output}_row"), [("x", x.into()), ("axes", [2, 3].into())])?;
        self.output(output, y)
    }

    /// `[B, 1, 1, S]` → `[B, S]`, as an output.
    pub fn per_position(&mut self, output: &str, x: ValueId) -> Result<ValueId> {
        let y = self.op("squeeze", &format!("{output}_row"), [("x", x.into()), ("axes", [1, 2].into())])?;
        self.output(output, y)
    }

    /// Gives a value the name that hosts know it by.
    pub(super) fn output(&mut self, name: &str, y: ValueId) -> Result<ValueId> {
        self.builder.rename(y, name)?;
        Ok(y)
    }
}
