"""Who is there: the world and its ranks, starting them, agreement, and watching over them."""
