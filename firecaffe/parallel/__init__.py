"""Model parallelism: layers cut into parts, of which each rank holds some."""
