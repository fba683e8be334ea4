"""The resident trainer: LoRA slots, GRPO, sessions, HTTP service and client."""
