//! chaos-tests
