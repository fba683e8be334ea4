"""Memory plans of trainer, engine and adapters, made before anything is loaded."""
