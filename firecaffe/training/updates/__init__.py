"""Who applies an update of the weights, and how the sums of gradients get there."""
