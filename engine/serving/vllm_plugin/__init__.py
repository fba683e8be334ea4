"""Our vLLM plugin: patches of vLLM, each with its reason, version bound and removal condition."""
