"""The queries of Kiln, a module each: thin wiring of source, transforms and sink. Each also runs alone with spark-submit."""
