"""Where scripts import bulk registration from in 0.1; it lives in `engine.publishing.bulk`.

Goes with 0.2.
"""

from engine.publishing.bulk import Entry, Registered, register_many

__all__ = ["Entry", "Registered", "register_many"]
