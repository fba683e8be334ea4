"""The services: what they are, how they are started, supervised and stopped."""
