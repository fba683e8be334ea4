"""LoRA on dense layers, for rows of many adapters."""
