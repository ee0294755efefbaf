"""The command `kiln`: a file for each group of commands."""
