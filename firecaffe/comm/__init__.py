"""Ranks: the world, starting one, executing a schedule, agreeing."""
