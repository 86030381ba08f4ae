//! Feed-forward blocks: two projections around an activation, with a gate or without.

use super::{Act, Hidden, Net};
use crate::error::Result;

impl Net<'_> {
    /// `down(act(gate(x)) · up(x))`, gate and up in one convolution.
    pub fn gated(&mut self, names: [&str; 3], act: Act, x: Hidden) -> Result<Hidden> {
        self.gated_scaled(names, act, 1.0, x)
    }

    /// As [`gated`](Self::gated), times `weight`, which is folded into the last projection.
    pub fn gated_scaled(
        &mut self,
        [gate, up, down]: [&str; 3],
        act: Act,
        weight: f32,
        x: Hidden,
    ) -> Result<Hidden> {
        let (g, u) = (self.projection(gate)?, self.projection(up)?);
        let both = self.stacked(&format!("{gate}_up"), &[g, u], x)?;
        let h = self.gate_halves(gate, act, both)?;
        let down_rows = self.projection(down)?.scaled(weight);
        self.stacked(down, &[down_rows], h)
    }

    /// `down(act(up(x)))`
    pub fn feed_forward(&mut self, up: &str, down: &str, act: Act, x: Hidden) -> Result<Hidden> {
        let rows = self.projection(up)?;
        let h = self.stacked(up, &[rows], x)?;
        let h = self.act(act, h)?;
        let rows = self.projection(down)?;
        self.stacked(down, &[rows], h)
    }

    /// act(first half) · second half of the channels.
    pub fn gate_halves(&mut self, name: &str, act: Act, both: Hidden) -> Result<Hidden> {
        let parts = self.split_channels(&format!("{name}_halves"), both.0, 1, 2)?;
        let gate = self.act(act, Hidden(parts[0]))?;
        Ok(Hidden(self.binary("mul", &format!("{name}_gated"), gate, parts[1])?))
    }
}
