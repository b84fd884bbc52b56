"""Parts of anyone's training script: DDP with our exchange, and timings of its steps."""
