"""The services: their commands, their start, supervision and stop."""
