"""What stands before a service: its credential, its key check, its Host allow-list and TLS."""
