"""LoRA on a mixture of experts."""
