"""What runs inside vLLM: plugin, loader, residency, gateway; and how its server is started."""
