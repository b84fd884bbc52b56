"""When workers exchange, and who computes what: policies as pure objects, without torch."""
