"""Metering: every request's tokens, reserved before it is forwarded and settled after; budgets; usage."""
