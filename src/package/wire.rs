//! Walking over a protobuf message whose schema is not needed.

use prost::encoding::decode_varint;

use crate::{
    bail,
    error::{Error, Result},
};

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
