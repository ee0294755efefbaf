"""Configuration files: `kiln.toml`, which `kiln.conf.settings` reads, quality suites, pinned jars, broker and logs.

`kiln.conf.process` has code that every top-level package but `schemas` may import, such as errors, locks and back-off.
"""
