//! The BC1S vocabulary: what the Neural Engine wants, as blocks to write architectures with.
//!
//! An activation is `[batch, channels, 1, sequence]` from the embedding to the head; see [`net`].

pub mod act;
pub mod attention;
pub mod best;
pub mod cache;
pub mod embed;
pub mod head;
pub mod head_norm;
pub mod linear;
pub mod mlp;
pub mod moe;
pub mod net;
pub mod norm;
pub mod rms;
pub mod rope;
pub mod rotary;
pub mod stack;

pub use act::Act;
pub use attention::{Heads, Mask};
pub use net::{Hidden, Net};
