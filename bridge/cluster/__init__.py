"""Cooperation of the bridges of one network: the live bridges, the one that fetches, and the topics that each joins."""
