"""What runs inside vLLM: gateway, residency, worker, plugin; and how its server is started."""
