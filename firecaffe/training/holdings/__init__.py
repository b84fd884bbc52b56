"""Holdings: the part of a model that a rank has, and how ranks compute micro-batches with it."""
