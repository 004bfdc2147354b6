"""Drawings: scenes, axes, and figures as image files."""
