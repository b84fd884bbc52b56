"""Shards of whatever a user has: sources, the packing itself, and its verification."""
