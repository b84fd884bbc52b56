"""The recipe of a run: its sections, the words in them, and which of them decide bits."""
