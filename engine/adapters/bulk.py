"""Deprecated import path of `engine.publishing.bulk`, kept for scripts of 0.1; to be removed in 0.2."""

from engine.publishing.bulk import Entry, Registered, register_many

__all__ = ["Entry", "Registered", "register_many"]
