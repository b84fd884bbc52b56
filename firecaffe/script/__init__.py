"""Parts for a user's own training script: DDP with our exchange, and timings of its steps."""
