"""Releases, container images, manifests, dashboards, the documentation site."""
