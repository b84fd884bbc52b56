"""Modes of a training: when ranks exchange what they computed, and which contributions count."""
