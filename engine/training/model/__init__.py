"""LoRA on the resident base: factors, layers, packed sequences, forward and backward."""
