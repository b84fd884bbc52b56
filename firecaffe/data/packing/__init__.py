"""Packing of images into shards: the sources, the packing, and its verification."""
