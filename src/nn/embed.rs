//! From token ids to an activation: the integer work, kept at the very start of a function.

use super::{Hidden, Net, head::WIDEST, linear::Rows};
use crate::{
    bail,
    error::Result,
    mil::{ValueId, Weight},
};

impl Net<'_> {
    /// Rows of the table `name.weight` for ids `[B, S]`: `[B, S, C]`.
    pub fn lookup(&mut self, name: &str, ids: ValueId) -> Result<ValueId> {
        let weight = self.source(&format!("{name}.weight"))?;
        let table = self.store(&weight, "", weight.shape.clone(), Ok);
        self.lookup_in(name, table, ids)
    }

    pub fn lookup_in(&mut self, name: &str, table: Weight, ids: ValueId) -> Result<ValueId> {
        if table.shape.len() != 2 {
            bail!("{}: {:?} is no table of [rows, channels]", self.place(name), table.shape);
        }
        self.op("gather", name, [("x", table.into()), ("indices", ids.into()), ("axis", 0.into())])
    }

    /// Rows of the token embedding `name.weight`. `pieces` cuts a table that is wider than
    /// [`WIDEST`](super::head::WIDEST) as the head that shares it is cut, so that it is stored once.
    pub fn lookup_tokens(&mut self, name: &str, ids: ValueId, pieces: bool) -> Result<ValueId> {
        let weight = self.source(&format!("{name}.weight"))?;
        let [rows, width] = weight.shape[..] else {
            bail!("{}: {:?} is no table of [rows, channels]", self.place(name), weight.shape);
        };
        if !pieces || rows <= WIDEST {
            return self.lookup(name, ids);
        }
        let int = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let mut found: Option<ValueId> = None;
        for start in (0..rows).step_by(WIDEST) {
            let n = WIDEST.min(rows - start);
            let order: Vec<usize> = (start..start + n).collect();
            let table = Rows { order, scale: 1.0 }.store(self, &weight, width, vec![n, width]);
            let local = self.binary("sub", &format!("{name}_local"), ids, int(start))?;
            let local = self.binary("maximum", &format!("{name}_from_0"), local, 0)?;
            let local = self.binary("minimum", &format!("{name}_inside"), local, int(n - 1))?;
            let piece = self.lookup_in(name, table, local)?;
            found = Some(match found {
                None => piece,
                Some(before) => {
                    let here = self.binary("greater_equal", &format!("{name}_here"), ids, int(start))?;
                    let here = self.op(
                        "expand_dims",
                        &format!("{name}_rows"),
                        [("x", here.into()), ("axes", [2].into())],
                    )?;
                    self.op(
                        "select",
                        &format!("{name}_joined"),
                        [("cond", here.into()), ("a", piece.into()), ("b", before.into())],
                    )?
                }
            });
        }
        found.ok_or_else(|| crate::Error::new(format!("{}: the table is empty", self.place(name))))
    }

    /// `[B, S, C]` → `[B, C, 1, S]`.
    pub fn to_hidden(&mut self, name: &str, x: ValueId) -> Result<Hidden> {
        let x = self.op(
            "transpose",
            &format!("{name}_transpose"),
            [("x", x.into()), ("perm", [0, 2, 1].into())],
        )?;
        Ok(Hidden(self.op("expand_dims", name, [("x", x.into()), ("axes", [2].into())])?))
    }

    /// A table with one row of another added to each of its rows, so that the sum costs no op.
    pub fn table_plus_row(&self, table: &str, other: &str, row: usize) -> Result<Weight> {
        let (table, other) =
            (self.source(&format!("{table}.weight"))?, self.source(&format!("{other}.weight"))?);
        let channels = table.shape.last().copied().unwrap_or(0);
        if other.shape.last() != Some(&channels) || other.shape.first().is_none_or(|n| *n <= row) {
            bail!("{:?} has no row {row} to add to {:?}", other.shape, table.shape);
        }
        let how = format!("+ row {row} of {}", other.key);
        let shape = table.shape.clone();
        Ok(self.store(&table, &how, shape, move |mut all| {
            let other = other.floats()?;
            let row = other.get(row * channels..(row + 1) * channels).unwrap_or(&[]);
            for line in all.chunks_mut(channels.max(1)) {
                line.iter_mut().zip(row).for_each(|(v, r)| *v += r);
            }
            Ok(all)
        }))
    }

    /// The first S rows of a table of positions as a constant `[1, C, 1, S]`, added to `x`.
    pub fn add_positions(&mut self, name: &str, table: &Weight, x: Hidden) -> Result<Hidden> {
        let (tokens, channels) = (self.tokens, self.channels(x)?);
        if table.shape.len() != 2 || table.shape[1] != channels || table.shape[0] < tokens {
            bail!(
                "{}: {:?} holds no {tokens} positions of {channels} channels",
                self.place(name),
                table.shape
            );
        }
        let shape = [1, channels, 1, tokens];
        let rows = self.store(table, &format!("first {tokens} rows, channels first"), shape, move |all| {
            let column = |c: usize| (0..tokens).map(move |p| p * channels + c);
            Ok((0..channels).flat_map(column).filter_map(|i| all.get(i).copied()).collect())
        });
        Ok(Hidden(self.binary("add", name, x.0, rows)?))
    }
}
