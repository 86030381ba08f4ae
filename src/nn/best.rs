//! The likeliest token, found in the graph: the lowest id of those whose logit is the largest.
//!
//! The Neural Engine has no arg-max over more than 2048 elements, and none that says which of equals it
//! takes. So logits are laid out in columns of 2048, whose places fp16 counts exactly, and the place is found
//! by comparing and taking minima. Integers come last, one per column:
//!
//! ```text
//! logits [1, V, 1, 1] → columns [1, 2048, 1, P] → maximum and place of each [1, 1, 1, P] → [1, 1]
//! ```

use super::{Hidden, Net, cache::size};
use crate::{
    error::Result,
    graph::In,
    mil::{Const, DType, Literal, TensorType, ValueId},
};

/// Rows of a column.
pub const COLUMN: usize = 2048;
/// More than any token id.
const BEHIND: i32 = 1 << 30;

/// Columns of as many rows each `[1, rows, 1, 1]`, with the id of each one's first row.
struct Columns {
    rows: usize,
    starts: Vec<usize>,
    values: Vec<ValueId>,
}

impl Net<'_> {
    /// From the logits `[1, rows, 1, 1]` of each piece to the outputs `ids` int32 `[1, 1]` and `scores`
    /// `[1, 1]`.
    pub fn best_token(&mut self, ids: &str, scores: &str, pieces: &[Hidden]) -> Result<[ValueId; 2]> {
        let (mut maxima, mut places, mut starts) = (Vec::new(), Vec::new(), Vec::new());
        for columns in self.columns(pieces)? {
            let x = self.joined("best_columns", &columns.values)?;
            let largest = self.reduce("reduce_max", "best_of_columns", x, 1)?;
            // Places behind the largest come after all others, however they are rounded.
            let behind = self.binary("less", "best_behind", x, largest)?;
            let behind = self.cast("best_behind_one", behind, self.float)?;
            #[expect(clippy::cast_precision_loss, reason = "at most 2048")]
            let behind = self.binary("mul", "best_behind_by", behind, self.scalar(COLUMN as f32))?;
            #[expect(clippy::cast_precision_loss, reason = "at most 2048")]
            let count = (0..columns.rows).map(|i| i as f32).collect();
            let count = self.constant("0 1 2 …", &[1, columns.rows, 1, 1], count);
            let place = self.binary("add", "best_candidates", behind, count)?;
            places.push(self.reduce("reduce_min", "best_places", place, 1)?);
            maxima.push(largest);
            starts.extend(columns.starts.into_iter().map(size));
        }
        let (maxima, places) =
            (self.joined("best_maxima", &maxima)?, self.joined("best_all_places", &places)?);
        let score = self.reduce("reduce_max", "best_score", maxima, 3)?;
        let behind = self.binary("less", "best_column_behind", maxima, score)?;
        let behind = self.cast("best_column_behind_one", behind, DType::I32)?;
        let behind = self.binary("mul", "best_column_behind_by", behind, BEHIND)?;
        let shape = TensorType::new(DType::I32, [1, 1, 1, starts.len()]);
        let places = self.cast("best_all_places_whole", places, DType::I32)?;
        let all = self.binary("add", "best_ids", places, Const::literal(shape, Literal::Ints(starts)))?;
        let all = self.binary("add", "best_id_candidates", all, behind)?;
        let id = self.reduce("reduce_min", "best_id", all, 3)?;
        let (id, score) =
            (self.reshape("best_id_row", id, &[1, 1])?, self.reshape("best_score_row", score, &[1, 1])?);
        Ok([self.output(ids, id)?, self.output(scores, score)?])
    }

    /// The pieces cut into columns: the full ones, then what is left of a piece.
    fn columns(&mut self, pieces: &[Hidden]) -> Result<Vec<Columns>> {
        let (mut groups, mut start): (Vec<Columns>, usize) = (Vec::new(), 0);
        for piece in pieces {
            let rows = self.channels(*piece)?;
            let sizes: Vec<usize> = (0..rows).step_by(COLUMN).map(|at| COLUMN.min(rows - at)).collect();
            let columns = match sizes.len() {
                1 => vec![piece.0],
                _ => {
                    let sizes: Vec<i32> = sizes.iter().map(|s| size(*s)).collect();
                    let sizes = ("split_sizes", In::from(sizes.as_slice()));
                    self.ops("split", "best_parts", [("x", piece.0.into()), sizes, ("axis", 1.into())])?
                }
            };
            for (rows, column) in sizes.into_iter().zip(columns) {
                match groups.iter_mut().find(|g| g.rows == rows) {
                    Some(group) => {
                        group.starts.push(start);
                        group.values.push(column);
                    }
                    None => groups.push(Columns { rows, starts: vec![start], values: vec![column] }),
                }
                start += rows;
            }
        }
        Ok(groups)
    }

    /// Side by side along the last axis.
    fn joined(&mut self, name: &str, parts: &[ValueId]) -> Result<ValueId> {
        match parts {
            [one] => Ok(*one),
            _ => self.op("concat", name, [("values", In::from(parts)), ("axis", 3.into())]),
        }
    }

    fn reduce(&mut self, kind: &str, name: &str, x: ValueId, axis: i32) -> Result<ValueId> {
        let params = [("x", x.into()), ("axes", [axis].into()), ("keep_dims", true.into())];
        self.op(kind, name, params)
    }
}
