"""The recipe of a run: its sections and settings, and which settings decide bits."""
