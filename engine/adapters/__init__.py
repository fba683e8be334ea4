"""Revisions: their identity, formats, bytes and catalog."""
