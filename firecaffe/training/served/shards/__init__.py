"""Owners of the weights of a training with a server, a run of their elements on each rank."""
