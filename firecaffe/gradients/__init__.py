"""Sums each micro-batch's p.grad into the step's p.grad, to the same bits on any workers."""
