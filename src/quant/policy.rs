//! Which scheme each weight gets: rules in order, of which the first that fits decides.
//!
//! A policy is a recipe in TOML, read and written:
//!
//! ```toml
//! default = "lut4:g16"
//! smallest = 2048
//!
//! [[rule]]
//! op = "gather"
//! scheme = "int8"
//!
//! [[rule]]
//! weight = "*down_proj*"
//! scheme = "lut6:g16"
//! ```

use globset::{Glob, GlobMatcher};
use serde::{Deserialize, Serialize};

use super::scheme::Scheme;
use crate::{
    bail,
    error::{Context, Error, Result},
};

/// Smaller weights are not worth it: Core ML's own tools leave them too.
pub const SMALLEST: usize = 2048;

#[derive(Debug, Clone)]
pub struct Policy {
    /// For weights that no rule fits.
    pub default: Scheme,
    /// Weights of fewer elements stay as they are.
    pub smallest: usize,
    pub rules: Vec<Rule>,
}

/// Fits a weight by its name, by the kind of an op that reads it, or by both.
#[derive(Debug, Clone)]
pub struct Rule {
    weight: Option<GlobMatcher>,
    op: Option<String>,
    pub scheme: Scheme,
}

/// A weight as rules see it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seen<'a> {
    /// Its name in the program, that of its op, and that of the checkpoint's tensor where it is known.
    pub(super) names: &'a [&'a str],
    /// Kinds of the ops that read it.
    pub(super) ops: &'a [&'a str],
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Recipe {
    default: String,
    #[serde(default = "smallest")]
    smallest: usize,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    rule: Vec<RecipeRule>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecipeRule {
    #[serde(skip_serializing_if = "Option::is_none")]
    weight: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    op: Option<String>,
    scheme: String,
}

fn smallest() -> usize {
    SMALLEST
}

impl Policy {
    /// One scheme for every weight.
    pub fn uniform(scheme: Scheme) -> Policy {
        Policy { default: scheme, smallest: SMALLEST, rules: Vec::new() }
    }

    /// A recipe's text.
    pub fn parse(text: &str) -> Result<Policy> {
        let recipe: Recipe = toml::from_str(text)
            .map_err(|e| Error::new(e.to_string().trim_end().to_string()))
            .hint(|| {
                "a recipe has `default`, `smallest` and `[[rule]]` with `weight` or `op`, and `scheme`".into()
            })?;
        let rule = |(i, r): (usize, RecipeRule)| -> Result<Rule> {
            let place = || format!("rule {}", i + 1);
            let scheme = r.scheme.parse().at(place())?;
            Rule::new(r.weight.as_deref(), r.op.as_deref(), scheme).at(place())
        };
        Ok(Policy {
            default: recipe.default.parse().at("default")?,
            smallest: recipe.smallest,
            rules: recipe.rule.into_iter().enumerate().map(rule).collect::<Result<_>>()?,
        })
    }

    /// The recipe that says the same.
    pub fn text(&self) -> Result<String> {
        let rule = |r: &Rule| RecipeRule {
            weight: r.weight.as_ref().map(|g| g.glob().glob().to_string()),
            op: r.op.clone(),
            scheme: r.scheme.to_string(),
        };
        let recipe = Recipe {
            default: self.default.to_string(),
            smallest: self.smallest,
            rule: self.rules.iter().map(rule).collect(),
        };
        toml::to_string(&recipe).map_err(|e| Error::new(format!("the recipe cannot be written: {e}")))
    }

    /// Refuses schemes that quantize activations where no text taught what those are.
    pub fn refuse_untaught(&self, calibrated: bool) -> Result<()> {
        let mut schemes = self.rules.iter().map(|r| &r.scheme).chain([&self.default]);
        match schemes.find(|s| **s == Scheme::W8A8) {
            Some(scheme) if !calibrated => {
                bail!("`{scheme}` quantizes activations, and nothing is known of their ranges"; hint: "`silane convert CHECKPOINT --quantize {scheme} --calibrate TEXT` learns them from a text; `int8` compresses the weights alone")
            }
            _ => Ok(()),
        }
    }

    /// Which rule fits, if one does, and the scheme.
    pub(super) fn choose(&self, weight: Seen<'_>) -> (Option<usize>, &Scheme) {
        match self.rules.iter().position(|r| r.fits(weight)) {
            Some(i) => (Some(i), &self.rules[i].scheme),
            None => (None, &self.default),
        }
    }

    /// Refuses rules that fit nothing; `used` has the rules that fitted, of one program after the other.
    pub fn refuse_unused<'a>(&self, used: impl IntoIterator<Item = &'a [bool]>) -> Result<()> {
        let mut ever = vec![false; self.rules.len()];
        for one in used {
            ever.iter_mut().zip(one).for_each(|(e, u)| *e |= u);
        }
        match ever.iter().position(|e| !e) {
            Some(i) => {
                bail!("rule {} of the recipe, {}, fits no weight", i + 1, self.rules[i]; hint: "`silane inspect PACKAGE --weights` lists the names; the kinds of ops are `conv`, `linear`, `matmul`, `gather` and so on")
            }
            None => Ok(()),
        }
    }
}

impl Rule {
    /// `weight` is a pattern such as `*mlp*`; `op` a kind such as `gather`.
    pub fn new(weight: Option<&str>, op: Option<&str>, scheme: Scheme) -> Result<Rule> {
        if weight.is_none() && op.is_none() {
            bail!("neither `weight` nor `op` is given"; hint: "`default` is for all weights");
        }
        let glob = |text: &str| match Glob::new(text) {
            Ok(glob) => Ok(glob.compile_matcher()),
            Err(e) => bail!("`{text}` is no pattern: {}", e.kind()),
        };
        Ok(Rule { weight: weight.map(glob).transpose()?, op: op.map(str::to_string), scheme })
    }

    pub(super) fn fits(&self, weight: Seen<'_>) -> bool {
        self.weight.as_ref().is_none_or(|g| weight.names.iter().any(|n| g.is_match(n)))
            && self.op.as_ref().is_none_or(|op| weight.ops.contains(&op.as_str()))
    }
}

impl std::fmt::Display for Rule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let weight = self.weight.as_ref().map(|g| format!("weight `{}`", g.glob().glob()));
        let op = self.op.as_ref().map(|op| format!("op `{op}`"));
        let both: Vec<String> = weight.into_iter().chain(op).collect();
        f.write_str(&both.join(" and "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RECIPE: &str = "\
default = \"lut4:g16\"
smallest = 100

[[rule]]
op = \"gather\"
scheme = \"int8\"

[[rule]]
weight = \"*down_proj*\"
op = \"conv\"
scheme = \"lut6:g16\"

[[rule]]
weight = \"*head*\"
scheme = \"fp16\"
";

    #[test]
    fn the_first_rule_that_fits_decides() {
        let policy = Policy::parse(RECIPE).unwrap();
        for (names, ops, rule, scheme) in [
            (vec!["embed"], vec!["gather"], Some(0), "int8"),
            (vec!["head_weight"], vec!["gather", "conv"], Some(0), "int8"),
            (vec!["x", "layers.0.mlp.down_proj.weight"], vec!["conv"], Some(1), "lut6:g16"),
            (vec!["layers_0_mlp_down_proj_weight"], vec!["linear"], None, "lut4:g16"),
            (vec!["lm_head_weight"], vec!["conv"], Some(2), "fp16"),
        ] {
            let (by, chosen) = policy.choose(Seen { names: &names, ops: &ops });
            assert_eq!((by, chosen.to_string().as_str()), (rule, scheme), "{names:?}");
        }
        assert!(policy.refuse_unused([[true, false, true].as_slice(), &[false, true, false]]).is_ok());
        let unused = policy.refuse_unused([[true, false, true].as_slice()]).unwrap_err();
        assert_eq!(
            unused.message(),
            "rule 2 of the recipe, weight `*down_proj*` and op `conv`, fits no weight"
        );
    }

    #[test]
    fn a_recipe_is_written_and_read_again() {
        let text = Policy::parse(RECIPE).unwrap().text().unwrap();
        assert_eq!(text, RECIPE);
        let uniform = Policy::uniform("int8".parse().unwrap());
        assert_eq!(uniform.text().unwrap(), "default = \"int8\"\nsmallest = 2048\n");
    }

    #[test]
    fn broken_recipes_are_refused_with_the_place() {
        for (text, says) in [
            ("", "missing field `default`"),
            ("default = \"int9\"", "default: "),
            ("default = \"int8\"\nsmalest = 3", "unknown field `smalest`"),
            ("default = \"int8\"\n[[rule]]\nscheme = \"int8\"", "rule 1: neither `weight` nor `op` is given"),
            ("default = \"int8\"\n[[rule]]\nop = \"conv\"\nscheme = \"x\"", "rule 1: "),
            (
                "default = \"int8\"\n[[rule]]\nweight = \"[a\"\nscheme = \"int8\"",
                "rule 1: `[a` is no pattern",
            ),
        ] {
            let error = Policy::parse(text).unwrap_err();
            assert!(error.message().contains(says), "{text}: {error}");
        }
    }
}
