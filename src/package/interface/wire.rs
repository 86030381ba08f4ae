//! The interface from and to the wire, one to one.

use super::{
    Array, ColorSpace, DefaultValue, Feature, FeatureType, FunctionInterface, Image, Interface, Key,
    Metadata, SizeRange, Sizes,
};
use crate::{mil::DType, package::proto::coreml as pb};

pub(in crate::package) fn decode(d: pb::ModelDescription, updatable: bool) -> Interface {
    let whole = FunctionInterface {
        name: String::new(),
        inputs: features(d.input),
        outputs: features(d.output),
        states: features(d.state),
        predicted_feature: d.predicted_feature_name,
        predicted_probabilities: d.predicted_probabilities_name,
    };
    let multi_function = !d.functions.is_empty() || !d.default_function_name.is_empty();
    let mut functions: Vec<FunctionInterface> = d.functions.into_iter().map(function).collect();
    if !multi_function {
        functions.push(FunctionInterface { name: "main".into(), ..whole });
    } else if whole != FunctionInterface::default() {
        functions.push(whole);
    }
    let m = d.metadata.unwrap_or_default();
    Interface {
        functions,
        multi_function,
        default_function: d.default_function_name,
        training_inputs: features(d.training_input),
        metadata: Metadata {
            description: m.short_description,
            version: m.version_string,
            author: m.author,
            license: m.license,
            user_defined: m.user_defined,
        },
        updatable,
    }
}

pub(in crate::package) fn encode(i: &Interface) -> pb::ModelDescription {
    let whole = |f: &&FunctionInterface| !i.multi_function || f.name.is_empty();
    let top = i.functions.iter().find(whole).cloned().unwrap_or_default();
    let m = &i.metadata;
    let metadata = pb::Metadata {
        short_description: m.description.clone(),
        version_string: m.version.clone(),
        author: m.author.clone(),
        license: m.license.clone(),
        user_defined: m.user_defined.clone(),
    };
    pb::ModelDescription {
        input: wire_features(&top.inputs),
        output: wire_features(&top.outputs),
        state: wire_features(&top.states),
        predicted_feature_name: top.predicted_feature,
        predicted_probabilities_name: top.predicted_probabilities,
        functions: i.functions.iter().filter(|f| !whole(f)).map(wire_function).collect(),
        default_function_name: i.default_function.clone(),
        training_input: wire_features(&i.training_inputs),
        metadata: (metadata != pb::Metadata::default()).then_some(metadata),
    }
}

fn function(f: pb::FunctionDescription) -> FunctionInterface {
    FunctionInterface {
        name: f.name,
        inputs: features(f.input),
        outputs: features(f.output),
        states: features(f.state),
        predicted_feature: f.predicted_feature_name,
        predicted_probabilities: f.predicted_probabilities_name,
    }
}

fn wire_function(f: &FunctionInterface) -> pb::FunctionDescription {
    pb::FunctionDescription {
        name: f.name.clone(),
        input: wire_features(&f.inputs),
        output: wire_features(&f.outputs),
        state: wire_features(&f.states),
        predicted_feature_name: f.predicted_feature.clone(),
        predicted_probabilities_name: f.predicted_probabilities.clone(),
    }
}

fn features(features: Vec<pb::FeatureDescription>) -> Vec<Feature> {
    features
        .into_iter()
        .map(|f| {
            let ty = f.r#type.unwrap_or_default();
            Feature {
                name: f.name,
                description: f.short_description,
                optional: ty.is_optional,
                ty: feature_type(ty.r#type),
            }
        })
        .collect()
}

fn wire_features(features: &[Feature]) -> Vec<pb::FeatureDescription> {
    features
        .iter()
        .map(|f| {
            let ty = pb::FeatureType { is_optional: f.optional, r#type: wire_type(&f.ty) };
            pb::FeatureDescription {
                name: f.name.clone(),
                short_description: f.description.clone(),
                r#type: (ty != pb::FeatureType::default()).then_some(ty),
            }
        })
        .collect()
}

fn feature_type(t: Option<pb::feature_type::Type>) -> FeatureType {
    use pb::{dictionary_feature_type as dict, feature_type::Type as T, sequence_feature_type as seq};
    match t {
        None => FeatureType::Unset,
        Some(T::Int64Type(_)) => FeatureType::Int64,
        Some(T::DoubleType(_)) => FeatureType::Double,
        Some(T::StringType(_)) => FeatureType::String,
        Some(T::ImageType(i)) => FeatureType::Image(image(i)),
        Some(T::MultiArrayType(a)) => FeatureType::Array(array(a)),
        Some(T::DictionaryType(d)) => FeatureType::Dictionary(match d.key_type {
            None => Key::Unset,
            Some(dict::KeyType::Int64KeyType(_)) => Key::Int64,
            Some(dict::KeyType::StringKeyType(_)) => Key::String,
        }),
        Some(T::SequenceType(s)) => FeatureType::Sequence {
            element: match s.r#type {
                None => Key::Unset,
                Some(seq::Type::Int64Type(_)) => Key::Int64,
                Some(seq::Type::StringType(_)) => Key::String,
            },
            sizes: s.size_range.map(size_range),
        },
        Some(T::StateType(s)) => {
            FeatureType::State(s.r#type.map(|pb::state_feature_type::Type::ArrayType(a)| array(a)))
        }
    }
}

fn wire_type(t: &FeatureType) -> Option<pb::feature_type::Type> {
    use pb::{Empty, dictionary_feature_type as dict, feature_type::Type as T, sequence_feature_type as seq};
    Some(match t {
        FeatureType::Unset => return None,
        FeatureType::Int64 => T::Int64Type(Empty {}),
        FeatureType::Double => T::DoubleType(Empty {}),
        FeatureType::String => T::StringType(Empty {}),
        FeatureType::Image(i) => T::ImageType(wire_image(i)),
        FeatureType::Array(a) => T::MultiArrayType(wire_array(a)),
        FeatureType::Dictionary(key) => T::DictionaryType(pb::DictionaryFeatureType {
            key_type: match key {
                Key::Unset => None,
                Key::Int64 => Some(dict::KeyType::Int64KeyType(Empty {})),
                Key::String => Some(dict::KeyType::StringKeyType(Empty {})),
            },
        }),
        FeatureType::Sequence { element, sizes } => T::SequenceType(pb::SequenceFeatureType {
            size_range: sizes.map(wire_range),
            r#type: match element {
                Key::Unset => None,
                Key::Int64 => Some(seq::Type::Int64Type(Empty {})),
                Key::String => Some(seq::Type::StringType(Empty {})),
            },
        }),
        FeatureType::State(a) => {
            let array = a.as_ref().map(|a| pb::state_feature_type::Type::ArrayType(wire_array(a)));
            T::StateType(pb::StateFeatureType { r#type: array })
        }
    })
}

fn array(a: pb::ArrayFeatureType) -> Array {
    use pb::array_feature_type::{DefaultOptionalValue as D, ShapeFlexibility as S};
    Array {
        dtype: ARRAY_TYPES.iter().find(|(_, code)| *code == a.data_type).map(|(dtype, _)| *dtype),
        shape: a.shape,
        sizes: match a.shape_flexibility {
            None => Sizes::Fixed,
            Some(S::EnumeratedShapes(e)) => Sizes::OneOf(e.shapes.into_iter().map(|s| s.shape).collect()),
            Some(S::ShapeRange(r)) => Sizes::Range(r.size_ranges.into_iter().map(size_range).collect()),
        },
        default: a.default_optional_value.map(|d| match d {
            D::IntDefaultValue(v) => DefaultValue::Int(v),
            D::FloatDefaultValue(v) => DefaultValue::Float(v),
            D::DoubleDefaultValue(v) => DefaultValue::Double(v),
        }),
    }
}

fn wire_array(a: &Array) -> pb::ArrayFeatureType {
    use pb::array_feature_type::{
        DefaultOptionalValue as D, EnumeratedShapes, Shape, ShapeFlexibility as S, ShapeRange,
    };
    pb::ArrayFeatureType {
        shape: a.shape.clone(),
        data_type: ARRAY_TYPES.iter().find(|(d, _)| Some(*d) == a.dtype).map_or(0, |(_, code)| *code),
        shape_flexibility: match &a.sizes {
            Sizes::Fixed => None,
            Sizes::OneOf(shapes) => {
                let shapes = shapes.iter().map(|s| Shape { shape: s.clone() }).collect();
                Some(S::EnumeratedShapes(EnumeratedShapes { shapes }))
            }
            Sizes::Range(ranges) => {
                let size_ranges = ranges.iter().copied().map(wire_range).collect();
                Some(S::ShapeRange(ShapeRange { size_ranges }))
            }
        },
        default_optional_value: a.default.map(|d| match d {
            DefaultValue::Int(v) => D::IntDefaultValue(v),
            DefaultValue::Float(v) => D::FloatDefaultValue(v),
            DefaultValue::Double(v) => D::DoubleDefaultValue(v),
        }),
    }
}

fn image(i: pb::ImageFeatureType) -> Image {
    use pb::image_feature_type::SizeFlexibility as S;
    Image {
        width: i.width,
        height: i.height,
        color: COLORS.iter().find(|(_, code)| *code == i.color_space).map_or(ColorSpace::Unset, |(c, _)| *c),
        sizes: match i.size_flexibility {
            None => Sizes::Fixed,
            Some(S::EnumeratedSizes(e)) => {
                Sizes::OneOf(e.sizes.into_iter().map(|s| (s.width, s.height)).collect())
            }
            Some(S::ImageSizeRange(r)) => {
                Sizes::Range(r.width_range.map(size_range).zip(r.height_range.map(size_range)))
            }
        },
    }
}

fn wire_image(i: &Image) -> pb::ImageFeatureType {
    use pb::image_feature_type::{EnumeratedImageSizes, ImageSize, ImageSizeRange, SizeFlexibility as S};
    pb::ImageFeatureType {
        width: i.width,
        height: i.height,
        color_space: COLORS.iter().find(|(c, _)| *c == i.color).map_or(0, |(_, code)| *code),
        size_flexibility: match &i.sizes {
            Sizes::Fixed => None,
            Sizes::OneOf(sizes) => {
                let sizes = sizes.iter().map(|(width, height)| ImageSize { width: *width, height: *height });
                Some(S::EnumeratedSizes(EnumeratedImageSizes { sizes: sizes.collect() }))
            }
            Sizes::Range(range) => Some(S::ImageSizeRange(ImageSizeRange {
                width_range: range.map(|(w, _)| wire_range(w)),
                height_range: range.map(|(_, h)| wire_range(h)),
            })),
        },
    }
}

fn size_range(r: pb::SizeRange) -> SizeRange {
    SizeRange { lower: r.lower_bound, upper: r.upper_bound }
}

fn wire_range(r: SizeRange) -> pb::SizeRange {
    pb::SizeRange { lower_bound: r.lower, upper_bound: r.upper }
}

const ARRAY_TYPES: [(DType, i32); 5] = [
    (DType::F16, 0x10010),
    (DType::F32, 0x10020),
    (DType::F64, 0x10040),
    (DType::I8, 0x20008),
    (DType::I32, 0x20020),
];

const COLORS: [(ColorSpace, i32); 4] =
    [(ColorSpace::Gray, 10), (ColorSpace::Rgb, 20), (ColorSpace::Bgr, 30), (ColorSpace::GrayFloat16, 40)];
