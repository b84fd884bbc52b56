"""Unusual networks and data: each ends in the same bits on any number of workers, or in a line."""
