"""Residency: where adapters are now, and the cold loads that move them."""
