"""Compression of networks: weights pruned, shared, in fewer dimensions."""
