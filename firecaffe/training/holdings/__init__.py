"""Which part of a model a rank holds, and how the ranks that hold one compute micro-batches."""
