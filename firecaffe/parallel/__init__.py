"""Which worker holds what: layers cut into parts, each rank with some of them."""
