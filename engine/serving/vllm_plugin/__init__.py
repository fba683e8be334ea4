"""vLLM's plugin: patches of vLLM, each with its reason and the version it was read against."""
