"""The bridge as a process: its entry point, and the wiring of its parts from the settings."""
