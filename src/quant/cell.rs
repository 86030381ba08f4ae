//! A weight on its way into a file: it is encoded when its first piece is asked for, and what is left of
//! the encoding is dropped with the last piece. What is known of its quality stays.

use std::{
    fmt,
    sync::{Arc, Mutex, OnceLock, PoisonError},
};

use rayon::prelude::*;

use super::{
    calibration::{Guide, Method},
    encoded::{self, Encoded},
    forms::{Piece, Plan},
    pack::bytes_of,
    scheme::Scheme,
};
use crate::{
    bail,
    error::{Context, Result},
    mil::{Bytes, Weight},
};

/// What a stored tensor is to the weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Codes,
    Scale,
    Offset,
    Indices,
    Lut,
    /// Of int8 tables.
    LutScale,
    Mask,
    /// The elements that a mask keeps.
    Values,
}

/// How near a compressed weight is to what it was made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Quality {
    /// Signal over error in decibels, infinite where there is no error.
    pub sqnr_db: f64,
    pub max_error: f64,
    pub squared_error: f64,
    /// The sum of squares of the weight itself.
    pub power: f64,
}

/// A weight in one shape; several shapes may share the pieces.
#[derive(Clone)]
pub(super) struct Cell {
    shared: Arc<Shared>,
    plan: Plan,
}

struct Shared {
    key: String,
    /// The weight's name, for messages.
    place: String,
    source: Weight,
    plan: Plan,
    pieces: Vec<Piece>,
    /// Packed pieces that were encoded and not yet taken.
    held: Mutex<Vec<Option<Vec<u8>>>>,
    quality: OnceLock<Quality>,
    guide: Option<Known>,
}

/// What is known of a weight's inputs, or why nothing is.
type Known = Result<Guide, String>;

impl Cell {
    pub(super) fn new(place: &str, source: &Weight, plan: Plan, guide: Option<Known>) -> Cell {
        let pieces = plan.pieces();
        let shared = Shared {
            key: plan.key(source),
            place: place.into(),
            source: source.clone(),
            plan: plan.clone(),
            held: Mutex::new(pieces.iter().map(|_| None).collect()),
            pieces,
            quality: OnceLock::new(),
            guide,
        };
        Cell { shared: Arc::new(shared), plan }
    }

    /// The same weight in another shape of as many elements.
    pub(super) fn shaped(&self, plan: Plan) -> Cell {
        Cell { shared: self.shared.clone(), plan }
    }

    pub(super) fn same(&self, other: &Cell) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    pub(super) fn key(&self) -> &str {
        &self.shared.key
    }

    /// The weight that is compressed.
    pub(super) fn source(&self) -> &Weight {
        &self.shared.source
    }

    pub(super) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// There once the weight was encoded.
    pub(super) fn quality(&self) -> Option<Quality> {
        self.shared.quality.get().copied()
    }

    /// How codes are chosen by what is known of the inputs, or why nothing is; `None` without calibration.
    pub(super) fn method(&self) -> Option<Result<Method, &str>> {
        let guide = self.shared.guide.as_ref()?;
        let plan = &self.shared.plan;
        Some(guide.as_ref().map(|g| g.method(&plan.scheme, plan.layout())).map_err(String::as_str))
    }

    /// The relative error of what the weight makes with each of some schemes, each code the nearest.
    pub(super) fn losses(&self, schemes: &[Scheme]) -> Result<Vec<f64>> {
        let Shared { source, plan, guide, .. } = &*self.shared;
        let (layout, values) = (plan.layout(), source.floats()?);
        let guide = guide.as_ref().and_then(|g| g.as_ref().ok());
        let power = guide.map(|g| g.power(&values, layout)).transpose()?;
        let importance = guide.map(Guide::importance);
        let loss = |scheme: &Scheme| -> Result<f64> {
            let encoded = encoded::encode(&values, layout, scheme, importance.as_deref())?;
            match (guide, &power) {
                (Some(guide), Some(power)) => guide.loss(&source.key, &encoded, &values, layout, power),
                _ => Ok(encoded.stats(&values, layout)?.relative()),
            }
        };
        schemes.iter().map(loss).collect::<Result<_>>().at(format!("weight `{}`", self.shared.place))
    }

    /// The weight as it will be read, and as it was.
    pub(super) fn decoded(&self) -> Result<(Vec<f32>, Vec<f32>)> {
        let values = self.shared.source.floats()?;
        let decoded = self.shared.compress(&values)?.decode(self.shared.plan.layout())?;
        Ok((decoded, values))
    }

    /// Bytes of all pieces.
    pub(super) fn bytes(&self) -> u64 {
        let size = |p: &Piece| p.dtype.packed_len(p.shape.iter().product()).unwrap_or(0) as u64;
        self.shared.pieces.iter().map(size).sum()
    }

    /// The promise of a piece.
    pub(super) fn piece(&self, part: Part) -> Result<Weight> {
        let Some(piece) = self.plan.pieces().into_iter().find(|p| p.part == part) else {
            bail!("`{}` has no {part:?}", self.plan.scheme);
        };
        let shared = self.shared.clone();
        let key = format!("{} | {part:?}", shared.key);
        Ok(Weight::new(key, piece.dtype, piece.shape, move || shared.take(part)))
    }
}

impl Shared {
    fn take(&self, part: Part) -> Result<Bytes> {
        let Some(at) = self.pieces.iter().position(|p| p.part == part) else { bail!("there is no {part:?}") };
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(bytes) = held[at].take() {
            return Ok(bytes.into());
        }
        let mut pieces = self.encode().at(format!("weight `{}`", self.place))?;
        let wanted = pieces[at].take();
        // A piece that is asked for again, while others wait to be taken, leaves those alone.
        if held.iter().all(Option::is_none) {
            *held = pieces;
        }
        match wanted {
            Some(bytes) => Ok(bytes.into()),
            None => bail!("{part:?} was not encoded"),
        }
    }

    fn compress(&self, values: &[f32]) -> Result<Encoded> {
        let plan = &self.plan;
        match &self.guide {
            Some(Ok(guide)) => guide.encode(values, plan.layout(), &plan.scheme),
            _ => encoded::encode(values, plan.layout(), &plan.scheme, None),
        }
    }

    fn encode(&self) -> Result<Vec<Option<Vec<u8>>>> {
        let plan = &self.plan;
        let values = self.source.floats()?;
        let encoded = self.compress(&values)?;
        let stats = encoded.stats(&values, plan.layout())?;
        let part = |p: &[f32]| p.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
        let parts: Vec<f64> = values.par_chunks(1 << 16).map(part).collect();
        drop(values);
        self.quality.get_or_init(|| Quality {
            sqnr_db: stats.sqnr_db,
            max_error: stats.max_error,
            squared_error: stats.squared_error,
            power: parts.into_iter().sum(),
        });
        let packed = self.pieces.iter().map(|p| bytes_of(&encoded, plan, p).map(Some));
        packed.collect()
    }
}

impl fmt::Debug for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cell({})", self.shared.key)
    }
}
