"""Examples that run: see README.md."""
