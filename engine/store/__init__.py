"""The store: bytes of packed adapters in append-only segments, local or behind a URL."""
