//! Layer format library.
