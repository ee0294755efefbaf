"""The command `kiln`: a file for each command or group of commands."""
