"""The command `kiln`: one module for each command or group of commands."""
