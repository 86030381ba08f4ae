//! Walking over a serialized message, with or without its schema.

use prost::encoding::decode_varint;

use crate::{
    bail,
    error::{Error, Result},
};

/// What a serialized message says, whatever the order of its map entries: how often each byte occurs in
/// its plain values, and how many values it has. Values of zero and empty ones say nothing.
#[derive(Debug, PartialEq)]
pub(super) struct Sum {
    bytes: [u64; 256],
    values: u64,
}

impl Sum {
    /// Sums up a `Model` that has been decoded; fails at a field that the schema does not have.
    pub(super) fn of(model: &[u8]) -> Result<Self> {
        let mut sum = Sum { bytes: [0; 256], values: 0 };
        match MESSAGES.iter().find(|(name, _)| *name == "Model") {
            Some(message) => sum.message(model, message)?,
            None => bail!("the schema has no `Model`"),
        }
        Ok(sum)
    }

    fn message(&mut self, bytes: &[u8], (name, fields): &Message) -> Result<()> {
        for field in Fields::new(bytes) {
            let (number, field) = field?;
            let Some((_, holds)) = fields.iter().find(|(n, _)| *n == number) else {
                bail!("field {number} of `{name}` is not known here");
            };
            match (holds.and_then(|i| MESSAGES.get(i)), field) {
                (Some(inner), Field::Bytes(b)) => self.message(b, inner)?,
                (_, Field::Bytes(b)) => self.value(b),
                (_, Field::Number(n)) => self.value(&n.to_le_bytes()),
            }
        }
        Ok(())
    }

    fn value(&mut self, bytes: &[u8]) {
        if bytes.iter().any(|b| *b != 0) {
            bytes.iter().for_each(|b| self.bytes[usize::from(*b)] += 1);
            self.values += 1;
        }
    }
}

/// A message's name, and its fields: number, and which message the field holds, if any.
type Message = (&'static str, &'static [(u64, Option<usize>)]);

static MESSAGES: &[Message] = include!(concat!(env!("OUT_DIR"), "/fields.rs"));

/// The fields of a message, in order.
pub(super) struct Fields<'a>(&'a [u8]);

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Field<'a> {
    Number(u64),
    Bytes(&'a [u8]),
}

impl<'a> Fields<'a> {
    pub(super) fn new(message: &'a [u8]) -> Self {
        Self(message)
    }

    fn number(&mut self) -> Result<u64> {
        decode_varint(&mut self.0).map_err(|e| Error::new(e.to_string()))
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8]> {
        match usize::try_from(len).ok().and_then(|n| self.0.split_at_checked(n)) {
            Some((head, rest)) => {
                self.0 = rest;
                Ok(head)
            }
            None => bail!("a field takes {len} bytes, {} are left", self.0.len()),
        }
    }

    fn field(&mut self) -> Result<(u64, Field<'a>)> {
        let key = self.number()?;
        let field = match key & 7 {
            0 => Field::Number(self.number()?),
            1 => Field::Bytes(self.take(8)?),
            2 => {
                let len = self.number()?;
                Field::Bytes(self.take(len)?)
            }
            5 => Field::Bytes(self.take(4)?),
            other => bail!("field {} has the wire type {other}", key >> 3),
        };
        Ok((key >> 3, field))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Field<'a>)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}
