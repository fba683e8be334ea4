"""Tensor operations on LoRA factors; not the Hugging Face package of the same name."""
