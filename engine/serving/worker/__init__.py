"""Parts inside the engine's worker: host tier, slots, loader and LoRA operations."""
