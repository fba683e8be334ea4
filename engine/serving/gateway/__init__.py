"""The gateway: who asks, which revision answers, and what came of it."""
