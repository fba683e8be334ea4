"""Policy losses, off-policy corrections, and the metrics of a batch."""
