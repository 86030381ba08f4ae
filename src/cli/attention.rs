//! `--attention`: how prefill attends to the cache, from its text form.

use std::str::FromStr;

use crate::{
    models::calls::{Attention, SPARSE, Tiles},
    nn::cache::sparse::{Gather, Scoring, Select, Sparse},
};

/// What was asked for, before the target decides what was left open.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Asked {
    Auto,
    Dense,
    Tiled(Tiles),
    Sparse { sparse: Sparse, tiles: Tiles, gather: Option<Gather>, select: Option<Select> },
}

const FORMS: &str = "`auto`, `dense`, `tiled[:tile=N,group=N,filled=yes|no]` or \
`block-sparse[:budget=N,block=N,sinks=N,window=N,alpha=X,dense-layers=N,gather=index|onehot,select=head|layer,\
scoring=row|tile,correction=yes|no,tile=N,group=N]` is expected";

impl FromStr for Asked {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (form, settings) = text.split_once(':').unwrap_or((text, ""));
        let mut tiles = Tiles::default();
        let mut sparse = SPARSE;
        let (mut gather, mut select) = (None, None);
        for setting in settings.split(',').filter(|s| !s.is_empty()) {
            let (key, value) =
                setting.split_once('=').ok_or_else(|| format!("`{setting}` is no `name=value`"))?;
            match (form, key) {
                ("tiled" | "block-sparse", "tile") => tiles.tile = Some(at_least(32, key, value)?),
                ("tiled" | "block-sparse", "group") => tiles.group = Some(at_least(1, key, value)?),
                ("tiled", "filled") => tiles.filled = yes(key, value)?,
                ("block-sparse", "budget") => sparse.budget = at_least(1, key, value)?,
                ("block-sparse", "block") => sparse.block = at_least(1, key, value)?,
                ("block-sparse", "sinks") => sparse.sinks = at_least(0, key, value)?,
                // The diagonal, which is always exact, is one of them, as in the published settings.
                ("block-sparse", "window") => sparse.window = at_least(1, key, value)? - 1,
                ("block-sparse", "alpha") => {
                    let alpha = value.parse().ok().filter(|a| (0.0..1.0).contains(a));
                    sparse.alpha =
                        alpha.ok_or_else(|| format!("`{key}` is `{value}`, 0 up to 1 is expected"))?;
                }
                ("block-sparse", "dense-layers") => sparse.dense_layers = at_least(0, key, value)?,
                ("block-sparse", "correction") => sparse.correction = yes(key, value)?,
                ("block-sparse", "gather") => {
                    gather =
                        Some(one_of(key, value, [("index", Gather::Index), ("onehot", Gather::OneHot)])?);
                }
                ("block-sparse", "select") => {
                    select = Some(one_of(key, value, [("head", Select::Head), ("layer", Select::Layer)])?);
                }
                ("block-sparse", "scoring") => {
                    sparse.scoring = one_of(key, value, [("row", Scoring::Row), ("tile", Scoring::Tile)])?;
                }
                _ => return Err(format!("`{form}` has no setting `{key}`; {FORMS}")),
            }
        }
        match form {
            "auto" => Ok(Asked::Auto),
            "dense" => Ok(Asked::Dense),
            "tiled" => Ok(Asked::Tiled(tiles)),
            "block-sparse" => Ok(Asked::Sparse { sparse, tiles, gather, select }),
            _ => Err(FORMS.into()),
        }
    }
}

impl Asked {
    /// `indexed` says that the target fetches by index quickly.
    pub(super) fn settled(self, indexed: bool) -> Attention {
        match self {
            Asked::Auto => Attention::Auto,
            Asked::Dense => Attention::Dense,
            Asked::Tiled(tiles) => Attention::Tiled(tiles),
            Asked::Sparse { mut sparse, tiles, gather, select } => {
                sparse.gather = gather.unwrap_or(if indexed { Gather::Index } else { Gather::OneHot });
                sparse.select = select.unwrap_or(if indexed { Select::Head } else { Select::Layer });
                Attention::Sparse(sparse, tiles)
            }
        }
    }
}

fn at_least(least: usize, key: &str, value: &str) -> Result<usize, String> {
    let number = value.parse().ok().filter(|n| *n >= least);
    number.ok_or_else(|| format!("`{key}` is `{value}`, a number from {least} on is expected"))
}

fn yes(key: &str, value: &str) -> Result<bool, String> {
    one_of(key, value, [("yes", true), ("no", false)])
}

fn one_of<T: Copy>(key: &str, value: &str, names: [(&str, T); 2]) -> Result<T, String> {
    let found = names.iter().find(|(name, _)| *name == value);
    found
        .map(|(_, v)| *v)
        .ok_or_else(|| format!("`{key}` is `{value}`, `{}` or `{}` is expected", names[0].0, names[1].0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_override_the_published_ones() {
        let sparse = Sparse { budget: 24, window: 1, alpha: 0.1, correction: false, ..SPARSE };
        let tiles = Tiles { tile: Some(256), group: Some(2), filled: true };
        for (text, settled) in [
            ("auto", Attention::Auto),
            ("dense", Attention::Dense),
            ("tiled", Attention::Tiled(Tiles::default())),
            ("tiled:tile=256,group=2,filled=yes", Attention::Tiled(tiles)),
            ("block-sparse", Attention::Sparse(SPARSE, Tiles::default())),
            (
                "block-sparse:budget=24,window=2,alpha=0.1,correction=no",
                Attention::Sparse(sparse, Tiles::default()),
            ),
        ] {
            assert_eq!(text.parse::<Asked>().map(|a| a.settled(false)), Ok(settled), "{text}");
        }
        let Attention::Sparse(sparse, _) = "block-sparse".parse::<Asked>().unwrap().settled(true) else {
            unreachable!()
        };
        assert_eq!((sparse.gather, sparse.select), (Gather::Index, Select::Head));
        for text in ["flash", "dense:tile=4", "tiled:tile=4", "tiled:tile", "block-sparse:alpha=2"] {
            assert!(text.parse::<Asked>().is_err(), "{text}");
        }
    }
}
