"""The ranks of a run: how they start, agree, and watch over each other."""
