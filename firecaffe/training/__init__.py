"""Training: the loop, the step, learning rates, optimizers, checkpoints."""
