"""Resident bases: find, build, families, sizes."""
