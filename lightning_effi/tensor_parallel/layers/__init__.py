"""Layers that hold parts of their weights."""
