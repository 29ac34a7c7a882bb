//! The scheduler, the cache and the engine thread over a scripted runner that behaves like a model: what it draws
//! depends on every token before it, and it reads those from the blocks that the plan names.

mod faults;
mod policy;
mod random;
mod scripted;
mod sim;
mod thread;
