"""Compression of a trained network: rounds of training, and the choice of layer sizes."""
