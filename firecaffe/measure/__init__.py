"""Measures the machine: links, exchanges, steps and input."""
