//! MIL types: element types, dimensions, tensors, and the few containers.

use std::{collections::BTreeMap, fmt};

use super::Const;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    Bool,
    String,
    F16,
    F32,
    F64,
    BF16,
    I4,
    I8,
    I16,
    I32,
    I64,
    U1,
    U2,
    U3,
    U4,
    U6,
    U8,
    U16,
    U32,
    U64,
    F8E4M3,
    F8E5M2,
}

impl DType {
    pub const ALL: [DType; 22] = [
        DType::Bool,
        DType::String,
        DType::F16,
        DType::F32,
        DType::F64,
        DType::BF16,
        DType::I4,
        DType::I8,
        DType::I16,
        DType::I32,
        DType::I64,
        DType::U1,
        DType::U2,
        DType::U3,
        DType::U4,
        DType::U6,
        DType::U8,
        DType::U16,
        DType::U32,
        DType::U64,
        DType::F8E4M3,
        DType::F8E5M2,
    ];

    /// The name that MIL text and the `cast` op use.
    pub fn name(self) -> &'static str {
        match self {
            DType::Bool => "bool",
            DType::String => "string",
            DType::F16 => "fp16",
            DType::F32 => "fp32",
            DType::F64 => "fp64",
            DType::BF16 => "bf16",
            DType::I4 => "int4",
            DType::I8 => "int8",
            DType::I16 => "int16",
            DType::I32 => "int32",
            DType::I64 => "int64",
            DType::U1 => "uint1",
            DType::U2 => "uint2",
            DType::U3 => "uint3",
            DType::U4 => "uint4",
            DType::U6 => "uint6",
            DType::U8 => "uint8",
            DType::U16 => "uint16",
            DType::U32 => "uint32",
            DType::U64 => "uint64",
            DType::F8E4M3 => "fp8e4m3fn",
            DType::F8E5M2 => "fp8e5m2",
        }
    }

    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }

    /// Bits per element in packed storage; strings have none.
    pub fn bits(self) -> Option<usize> {
        Some(match self {
            DType::String => return None,
            DType::U1 => 1,
            DType::U2 => 2,
            DType::U3 => 3,
            DType::I4 | DType::U4 => 4,
            DType::U6 => 6,
            DType::Bool | DType::I8 | DType::U8 | DType::F8E4M3 | DType::F8E5M2 => 8,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 16,
            DType::F32 | DType::I32 | DType::U32 => 32,
            DType::F64 | DType::I64 | DType::U64 => 64,
        })
    }

    /// Bytes that `count` elements take in packed storage; `None` for strings and on overflow.
    pub fn packed_len(self, count: usize) -> Option<usize> {
        count.checked_mul(self.bits()?).map(|bits| bits.div_ceil(8))
    }

    pub fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::F32 | DType::F64 | DType::BF16 | DType::F8E4M3 | DType::F8E5M2)
    }

    pub fn is_int(self) -> bool {
        !self.is_float() && !matches!(self, DType::Bool | DType::String)
    }

    /// The range of an integer type.
    pub fn int_range(self) -> Option<(i64, i64)> {
        Some(match self {
            DType::I4 => (-8, 7),
            DType::I8 => (-128, 127),
            DType::I16 => (-32768, 32767),
            DType::I32 => (i64::from(i32::MIN), i64::from(i32::MAX)),
            DType::I64 => (i64::MIN, i64::MAX),
            DType::U1 => (0, 1),
            DType::U2 => (0, 3),
            DType::U3 => (0, 7),
            DType::U4 => (0, 15),
            DType::U6 => (0, 63),
            DType::U8 => (0, 255),
            DType::U16 => (0, 65535),
            DType::U32 => (0, i64::from(u32::MAX)),
            DType::U64 => (0, i64::MAX),
            _ => return None,
        })
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dim {
    Fixed(usize),
    /// A flexible dimension; every one is a symbol of its own.
    Unknown {
        variadic: bool,
    },
}

impl Dim {
    pub const ANY: Dim = Dim::Unknown { variadic: false };

    pub fn fixed(self) -> Option<usize> {
        match self {
            Dim::Fixed(n) => Some(n),
            Dim::Unknown { .. } => None,
        }
    }

    /// Whether both can be the same size.
    pub fn agrees(self, other: Dim) -> bool {
        match (self, other) {
            (Dim::Fixed(a), Dim::Fixed(b)) => a == b,
            _ => true,
        }
    }
}

impl From<usize> for Dim {
    fn from(n: usize) -> Self {
        Dim::Fixed(n)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Dim::Fixed(n) => write!(f, "{n}"),
            Dim::Unknown { .. } => f.write_str("?"),
        }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct TensorType {
    pub dtype: DType,
    pub dims: Vec<Dim>,
    /// Carried as found; silane writes none.
    pub attrs: BTreeMap<String, Const>,
}

impl TensorType {
    pub fn new(dtype: DType, dims: impl IntoIterator<Item = impl Into<Dim>>) -> Self {
        Self { dtype, dims: dims.into_iter().map(Into::into).collect(), attrs: BTreeMap::new() }
    }

    pub fn scalar(dtype: DType) -> Self {
        Self { dtype, dims: Vec::new(), attrs: BTreeMap::new() }
    }

    pub fn rank(&self) -> usize {
        self.dims.len()
    }

    /// All sizes, when none is flexible.
    pub fn shape(&self) -> Option<Vec<usize>> {
        self.dims.iter().map(|d| d.fixed()).collect()
    }

    /// The number of elements, when every size is known and it fits.
    pub fn count(&self) -> Option<usize> {
        self.dims.iter().try_fold(1usize, |n, d| n.checked_mul(d.fixed()?))
    }

    /// Whether both can describe the same tensor: equal element type and rank, sizes that agree.
    pub fn agrees(&self, other: &TensorType) -> bool {
        self.dtype == other.dtype
            && self.dims.len() == other.dims.len()
            && self.dims.iter().zip(&other.dims).all(|(a, b)| a.agrees(*b))
    }
}

impl fmt::Display for TensorType {
    /// `fp16 [1, 384, 1, 128]`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.dtype, shape_text(&self.dims))
    }
}

/// `[1, 384, 1, 128]`
pub fn shape_text<D: fmt::Display>(dims: &[D]) -> String {
    let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
    format!("[{}]", dims.join(", "))
}

#[derive(Debug, Clone, PartialEq)]
pub enum Type {
    Tensor(TensorType),
    List {
        element: Box<Type>,
        length: Option<Dim>,
    },
    Tuple(Vec<Type>),
    Dict(Box<Type>, Box<Type>),
    State(Box<Type>),
    /// A type message with none of its alternatives set.
    Unset,
}

impl Type {
    pub fn tensor(dtype: DType, dims: impl IntoIterator<Item = impl Into<Dim>>) -> Self {
        Type::Tensor(TensorType::new(dtype, dims))
    }

    pub fn scalar(dtype: DType) -> Self {
        Type::Tensor(TensorType::scalar(dtype))
    }

    pub fn state(inner: TensorType) -> Self {
        Type::State(Box::new(Type::Tensor(inner)))
    }

    pub fn as_tensor(&self) -> Option<&TensorType> {
        match self {
            Type::Tensor(t) => Some(t),
            _ => None,
        }
    }

    /// The tensor that a state holds.
    pub fn as_state(&self) -> Option<&TensorType> {
        match self {
            Type::State(inner) => inner.as_tensor(),
            _ => None,
        }
    }

    pub fn agrees(&self, other: &Type) -> bool {
        match (self, other) {
            (Type::Tensor(a), Type::Tensor(b)) => a.agrees(b),
            (Type::State(a), Type::State(b)) => a.agrees(b),
            (Type::List { element: a, .. }, Type::List { element: b, .. }) => a.agrees(b),
            (Type::Tuple(a), Type::Tuple(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.agrees(b))
            }
            (Type::Dict(a, b), Type::Dict(c, d)) => a.agrees(c) && b.agrees(d),
            (Type::Unset, Type::Unset) => true,
            _ => false,
        }
    }
}

impl From<TensorType> for Type {
    fn from(t: TensorType) -> Self {
        Type::Tensor(t)
    }
}

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Type::Tensor(t) => write!(f, "{t}"),
            Type::List { element, length: Some(n) } => write!(f, "list<{element}, {n}>"),
            Type::List { element, length: None } => write!(f, "list<{element}>"),
            Type::Tuple(types) => {
                let types: Vec<String> = types.iter().map(ToString::to_string).collect();
                write!(f, "tuple<{}>", types.join(", "))
            }
            Type::Dict(k, v) => write!(f, "dict<{k}, {v}>"),
            Type::State(t) => write!(f, "state<{t}>"),
            Type::Unset => f.write_str("no type"),
        }
    }
}
