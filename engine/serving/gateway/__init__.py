"""The gateway: authentication, routing, observations, and our endpoints."""
