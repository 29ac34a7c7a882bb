//! Groups of real programs, norms, and whole jobs.
