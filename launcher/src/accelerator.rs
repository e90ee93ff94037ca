//! Which accelerator really runs a guest.
