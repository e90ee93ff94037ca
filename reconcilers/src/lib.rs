//! reconcilers
