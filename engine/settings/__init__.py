"""Settings: typed models of params.yaml, of forms, where state lies on disk, and how bits stay equal."""
