"""A run as words: its sections, what they may be, and what of them decides bits."""
