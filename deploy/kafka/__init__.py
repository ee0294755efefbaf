"""The broker that the settings name, and its topics."""
