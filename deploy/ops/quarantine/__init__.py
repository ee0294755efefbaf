"""Selection, replay and removal of quarantined records."""
