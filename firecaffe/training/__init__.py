"""The training: how it is built, run step by step, saved and resumed."""
