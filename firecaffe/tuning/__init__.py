"""Finds a learning rate for another batch size: candidates, trials, and a verdict on accuracy."""
