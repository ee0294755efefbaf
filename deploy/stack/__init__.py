"""Processes and services that Kiln starts: children, the embedded broker, Java, Spark."""
