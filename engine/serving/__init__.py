"""Everything that runs inside vLLM's server (gateway, residency, worker, plugin), and its start."""
