"""Formats of adapters: revisions, layouts, packed files."""
