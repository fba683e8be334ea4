"""The `graftwork` command: one module a group of commands."""

from flows.cli.command import app, main

__all__ = ["app", "main"]
