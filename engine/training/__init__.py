"""Training on the resident base: model, loss, the trainer service and its client."""
