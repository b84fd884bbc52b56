"""What a run leaves behind: its folder, its records, and comparisons between runs."""
