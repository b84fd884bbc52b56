"""A training with a server: events of `firecaffe.synchrony`, executed on tensors."""
