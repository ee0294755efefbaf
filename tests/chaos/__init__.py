"""Faults at seeded moments in a whole running Kiln, and what became of every frame, message, update and batch."""
