"""Residency: which adapters are in the host tier and in slots, and the queue of cold loads."""
