"""A training: built, run step by step, saved and resumed."""
