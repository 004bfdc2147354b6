"""Whoever watches a run: the terminal and trackers."""
