"""Training whose workers write to the same weights without waiting for each other (Hogwild)."""
