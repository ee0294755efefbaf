"""Terminal output of the commands, and their JSON."""
