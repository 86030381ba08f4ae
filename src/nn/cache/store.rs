//! A state of which new tokens take slots by their position.

use std::ops::Range;

use super::{Update, masks::iota, size};
use crate::{
    error::{Error, Result},
    graph::In,
    mil::{Const, DType, TensorType, Type, ValueId},
    nn::Net,
};

/// A state `[rows, heads, slots, channels]`, and its value so far.
pub(super) struct Store {
    name: &'static str,
    update: Update,
    state: ValueId,
    /// Updated in place as rows are put; a blended state stays as it was when the function began.
    value: ValueId,
    shape: [usize; 4],
    /// Slots that a call fills.
    count: usize,
    /// Of each row: where the new slots begin and end.
    begins: Vec<ValueId>,
    ends: Vec<ValueId>,
    /// For blending: `[1, 1, slots, count]` one-hot, and `[1, 1, slots, 1]` the slots that stay.
    blend: Option<(ValueId, ValueId)>,
    blended: Vec<Option<ValueId>>,
}

impl Store {
    /// Declares the state and reads it. `slots` `[1, count]` are the slots that a call fills, consecutive.
    pub(super) fn open(
        n: &mut Net<'_>,
        (state_name, name): (&str, &'static str),
        shape: [usize; 4],
        update: Update,
        (slots, count): (ValueId, usize),
    ) -> Result<Store> {
        let state = declare(n, state_name, shape)?;
        let (mut begins, mut ends, mut blend) = (Vec::new(), Vec::new(), None);
        match update {
            Update::Slice => (begins, ends) = bounds(n, name, shape, slots, count)?,
            Update::Blend => blend = Some(one_hot(n, name, shape[2], slots, count)?),
        }
        let value = n.op("read_state", name, [("input", state.into())])?;
        let blended = vec![None; shape[0]];
        Ok(Store { name, update, state, value, shape, count, begins, ends, blend, blended })
    }

    /// Puts new `[1, H, count, D]` into a row.
    pub(super) fn put(&mut self, n: &mut Net<'_>, place: &str, row: usize, new: ValueId) -> Result<()> {
        let new = n.cast(&format!("{place}_half"), new, DType::F16)?;
        match self.update {
            Update::Slice => {
                let bounds = (self.begins[row].into(), self.ends[row].into());
                update(n, place, self.state, self.value, new, bounds)?;
                self.value =
                    n.op("read_state", &format!("{place}_{}", self.name), [("input", self.state.into())])?;
            }
            Update::Blend => {
                let (placed, kept) = self.blend.ok_or_else(|| Error::new("no one-hot mask"))?;
                let old = self.slots(n, &format!("{place}_row"), row, 0..self.shape[1], 0..self.shape[2])?;
                let old = n.binary("mul", &format!("{place}_kept"), old, kept)?;
                let new = match self.count {
                    1 => n.binary("mul", &format!("{place}_placed"), new, placed)?,
                    _ => n.matmul(&format!("{place}_placed"), placed, new, false, false)?,
                };
                self.blended[row] = Some(n.binary("add", &format!("{place}_blended"), old, new)?);
            }
        }
        Ok(())
    }

    /// The first `slots` slots of a row, new ones included, in the function's element type.
    pub(super) fn row(&self, n: &mut Net<'_>, place: &str, row: usize, slots: usize) -> Result<ValueId> {
        let held = match self.blended[row] {
            Some(whole) => {
                let size = [1, self.shape[1], slots, self.shape[3]];
                n.slice(&format!("{place}_seen"), whole, &[0, 0, 0, 0], &size)?
            }
            None => self.slots(n, &format!("{place}_row"), row, 0..self.shape[1], 0..slots)?,
        };
        n.cast(&format!("{place}_float"), held, n.float)
    }

    /// Slots of some heads of a row that earlier calls filled, as they are stored.
    pub(super) fn slots(
        &self,
        n: &mut Net<'_>,
        name: &str,
        row: usize,
        heads: Range<usize>,
        slots: Range<usize>,
    ) -> Result<ValueId> {
        let size = [1, heads.len(), slots.len(), self.shape[3]];
        n.slice(name, self.value, &[row, heads.start, slots.start, 0], &size)
    }

    /// As [`Store::slots`] for all heads, from a slot that is known at run time: `begin` is `[4]`.
    pub(super) fn slots_from(
        &self,
        n: &mut Net<'_>,
        name: &str,
        begin: ValueId,
        slots: usize,
    ) -> Result<ValueId> {
        let of = [1, size(self.shape[1]), size(slots), size(self.shape[3])];
        n.op("slice_by_size", name, [("x", self.value.into()), ("begin", begin.into()), ("size", of.into())])
    }

    /// Ends the function: a blended state is written back.
    pub(super) fn finish(&mut self, n: &mut Net<'_>) -> Result<()> {
        let rows: Vec<ValueId> = self.blended.iter().flatten().copied().collect();
        if rows.is_empty() {
            return Ok(());
        }
        let name = self.name;
        let all = n.op(
            "concat",
            &format!("{name}_blended"),
            [("values", In::from(rows.as_slice())), ("axis", 0.into())],
        )?;
        n.ops(
            "write_state",
            &format!("{name}_write_state"),
            [("input", self.state.into()), ("data", all.into())],
        )?;
        Ok(())
    }
}

/// Declares a state, fp16.
pub(super) fn declare(n: &mut Net<'_>, name: &str, shape: [usize; 4]) -> Result<ValueId> {
    n.builder.input(name, Type::state(TensorType::new(DType::F16, shape)))
}

/// Puts `new` into a state in place: the update is of the state's own read, with all parameters written
/// out, which is the one form that every Core ML takes.
pub(super) fn update(
    n: &mut Net<'_>,
    place: &str,
    state: ValueId,
    value: ValueId,
    new: ValueId,
    (begin, end): (In, In),
) -> Result<()> {
    let whole = n.op(
        "slice_update",
        &format!("{place}_update"),
        [
            ("x", value.into()),
            ("update", new.into()),
            ("begin", begin),
            ("end", end),
            ("stride", [1, 1, 1, 1].into()),
            ("begin_mask", In::from(&[false; 4][..])),
            ("end_mask", In::from(&[false; 4][..])),
            ("squeeze_mask", In::from(&[false; 4][..])),
        ],
    )?;
    n.ops("write_state", &format!("{place}_write_state"), [("input", state.into()), ("data", whole.into())])?;
    Ok(())
}

/// Declares a state that a function only keeps: all functions have the same states, and an input that
/// nothing uses is refused, so a few elements are put back where they are.
pub(super) fn touch(n: &mut Net<'_>, (state_name, name): (&str, &str), shape: [usize; 4]) -> Result<()> {
    let state = declare(n, state_name, shape)?;
    let value = n.op("read_state", name, [("input", state.into())])?;
    let some = [1, 1, 1, shape[3]];
    let held = n.slice(&format!("{name}_kept"), value, &[0, 0, 0, 0], &some)?;
    let end = some.map(size);
    update(n, name, state, value, held, ([0, 0, 0, 0].into(), end.into()))
}

/// `[1]`, the first of consecutive positions `[1, T]`.
pub(super) fn first(n: &mut Net<'_>, name: &str, positions: ValueId) -> Result<ValueId> {
    let first = n.op(
        "slice_by_size",
        &format!("first_{name}"),
        [("x", positions.into()), ("begin", [0, 0].into()), ("size", [1, 1].into())],
    )?;
    n.op("reshape", name, [("x", first.into()), ("shape", [1].into())])
}

/// A vector `[row, 0, slot, 0]` for each row, all from one sum: `offsets` plus `slot` `[1]`.
pub(super) fn per_row(
    n: &mut Net<'_>,
    name: &str,
    rows: usize,
    moving: ValueId,
    offsets: &dyn Fn(usize) -> [usize; 4],
) -> Result<Vec<ValueId>> {
    let all = n.binary("add", name, moving, vectors(rows, offsets))?;
    n.split_channels(&format!("{name}_of_rows"), all, 0, rows)
}

/// `slot` `[1]` in the third place of a vector for each row.
pub(super) fn moving(n: &mut Net<'_>, name: &str, rows: usize, slot: ValueId) -> Result<ValueId> {
    n.binary("mul", name, vectors(rows, &|_| [0, 0, 1, 0]), slot)
}

fn vectors(rows: usize, f: &dyn Fn(usize) -> [usize; 4]) -> In {
    let values: Vec<i32> = (0..rows).flat_map(f).map(size).collect();
    Const::ints(&values).into()
}

/// Where the new slots go in each row of the state.
fn bounds(
    n: &mut Net<'_>,
    name: &str,
    [rows, heads, _, channels]: [usize; 4],
    slots: ValueId,
    count: usize,
) -> Result<(Vec<ValueId>, Vec<ValueId>)> {
    let first = first(n, &format!("{name}_position"), slots)?;
    let moving = moving(n, &format!("{name}_position_in_rows"), rows, first)?;
    let begins = per_row(n, &format!("{name}_begins"), rows, moving, &|r| [r, 0, 0, 0])?;
    let ends = per_row(n, &format!("{name}_ends"), rows, moving, &|r| [r + 1, heads, count, channels])?;
    Ok((begins, ends))
}

/// Which slot each new one goes to, `[1, 1, slots, count]`, and which slots keep what they hold,
/// `[1, 1, slots, 1]`.
fn one_hot(
    n: &mut Net<'_>,
    name: &str,
    all: usize,
    slots: ValueId,
    count: usize,
) -> Result<(ValueId, ValueId)> {
    let at = n.reshape(&format!("{name}_positions"), slots, &[1, 1, 1, count])?;
    let hit = n.binary("equal", &format!("{name}_hit"), iota(all, &[1, 1, all, 1]), at)?;
    let placed = n.op("cast", &format!("{name}_placed"), [("x", hit.into()), ("dtype", "fp16".into())])?;
    let taken = n.op(
        "reduce_sum",
        &format!("{name}_taken"),
        [("x", placed.into()), ("axes", [3].into()), ("keep_dims", true.into())],
    )?;
    let kept = n.binary("sub", &format!("{name}_kept_slots"), In::float(DType::F16, 1.0), taken)?;
    Ok((placed, kept))
}
