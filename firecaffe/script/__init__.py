"""Functions for a user's own training script: DDP with an exchange, and timings of steps."""
