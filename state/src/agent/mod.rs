//! The Agent cell: one VMI on one node.
