"""Tensor operations on LoRA factors. This is Graftwork's package, not the Hugging Face one of the same name."""
