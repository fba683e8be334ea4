"""Prefect flows, one a file, and the `graftwork` command."""
