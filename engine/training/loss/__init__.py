"""Losses of policies, their corrections, and what is measured of them."""
