"""From whatever a user has to shards: sources, the packing itself, and its verification."""
