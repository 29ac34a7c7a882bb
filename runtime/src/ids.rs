//! Newtypes for every index, so that a row can never be taken for a block.
//!
//! Invariant: an index says which table it indexes by its type; `index()` is the only way to a `usize`.

use serde::{Deserialize, Serialize};

macro_rules! index_type {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, bytemuck::Pod, bytemuck::Zeroable)]
        #[serde(transparent)]
        #[repr(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The index as a `usize`, for slices.
            pub fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{}", self.0)
            }
        }
    };
}

index_type!(
    /// A token of the model's vocabulary.
    TokenId
);
index_type!(
    /// A running sequence's place in the batch tables; it does not change while the sequence runs.
    Row
);
index_type!(
    /// A block of the paged KV cache. Block 0 is reserved: padding writes go there.
    BlockId
);
index_type!(
    /// A planned activation of a `Program`.
    Slot
);
index_type!(
    /// An immutable tensor of a `Program`.
    WeightId
);
index_type!(
    /// The state (KV planes) of one layer of a `Program`.
    Layer
);
index_type!(
    /// A program that a backend has compiled for one bucket.
    PlanId
);

/// Names one request for the life of the process; handed out by the engine handle, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct SeqId(pub u64);

impl std::fmt::Display for SeqId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.0)
    }
}
