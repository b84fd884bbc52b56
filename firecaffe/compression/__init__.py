"""Networks made small: weights pruned, shared, in fewer dimensions."""
