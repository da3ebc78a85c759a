//! Placeholder crate root, replaced by the first commit of the crate.
fn main() {}
