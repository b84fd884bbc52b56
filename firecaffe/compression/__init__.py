"""Networks made small: what is pruned, what is shared, and the file that they are kept in."""
