"""A small network of foreign peers to try Kiln with."""
