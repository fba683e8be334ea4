"""Memory, planned before anything is loaded: of the trainer, of the engine, of adapters."""
