"""Settings: typed models of params.yaml and of forms, paths of the state directory, equal bits."""
