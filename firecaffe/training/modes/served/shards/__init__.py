"""Owners of the weights of a training with a server: each rank owns a run of their elements."""
