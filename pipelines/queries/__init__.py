"""The queries of Kiln, a module each: `start(plan)` connects source, transforms and sink."""
