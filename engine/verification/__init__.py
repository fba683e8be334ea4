"""Locate the module at fault when the engine does not reproduce a revision."""
