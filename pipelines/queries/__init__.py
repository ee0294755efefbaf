"""The queries of Kiln, a module each: source, transforms and sink wired up. Each also runs alone with spark-submit."""
