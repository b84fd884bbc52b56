"""What a network carries from step to step, what it draws, and what its loss is a mean of.

The promise that the number of workers changes no bit holds for state that is known: parameters,
buffers, extra state. So a network is looked at before the first step (`state`), around its first
micro-batch (`watch`), and its loss is tried (`loss`). What can be kept under the promise is kept;
the rest is refused, or told as a doubt, in one line that names it.
"""
