"""Networks made small: weights pruned, shared, in fewer dimensions; the file that keeps them."""
