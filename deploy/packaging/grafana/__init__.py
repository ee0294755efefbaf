"""Dashboards for Grafana, and the files that put them there."""
