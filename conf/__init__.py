"""Configuration files: settings (read by `kiln.conf.settings`), quality suites, pinned jars, broker and log settings.

`kiln.conf.process` has code that every top-level package but `schemas` may import, such as errors, locks and back-off.
"""
