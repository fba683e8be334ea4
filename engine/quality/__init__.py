"""Ledger, sequential statistics and the release decision."""
