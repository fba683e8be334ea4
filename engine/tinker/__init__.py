"""The Tinker API: an HTTP face of trainer, engine and catalog for Tinker's own SDK."""
