"""When ranks exchange what they have computed, and which contributions count."""
