"""The record of a run: its folder, its files, and comparisons between runs."""
