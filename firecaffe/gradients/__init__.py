"""From each micro-batch's p.grad to the step's summed p.grad, to the same bits on any workers."""
