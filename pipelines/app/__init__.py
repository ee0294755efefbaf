"""Entry points: from settings to running queries, supervised or submitted."""
