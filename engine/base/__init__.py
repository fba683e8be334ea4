"""Resident bases: found or built, their families and sizes."""
