"""Settings: typed models of params.yaml, of forms, and where state lies on disk."""
