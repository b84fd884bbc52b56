"""Networks made small: weights pruned, shared, in fewer dimensions, and the file that keeps them."""
