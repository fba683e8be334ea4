"""Formats of adapters: revisions, layouts, packed files. Knows neither catalog nor store."""
