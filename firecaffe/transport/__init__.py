"""Moves data between ranks: executes schedules, sums in shared memory, sums nodes of the tree."""
