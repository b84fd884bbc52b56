"""The world and its ranks: starting them, agreement among them, and watching over them."""
