"""Updates of the weights: who applies them, and how sums of gradients reach these ranks."""
