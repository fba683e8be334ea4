"""Backups: objects named by their checksum, and the manifest that makes a backup of them."""
