//! tracer
