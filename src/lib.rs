//! Kittiwake as a library: pick a device, load a model, return an engine.
