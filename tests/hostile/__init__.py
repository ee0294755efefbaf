"""A bridge among peers that mean harm, and what became of the honest ones."""
