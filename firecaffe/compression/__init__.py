"""Compression of networks: pruned and shared weights, small files."""
