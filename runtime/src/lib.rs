//! Carrack.
