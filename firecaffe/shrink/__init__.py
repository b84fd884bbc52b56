"""A trained network made small: rounds of trainings, what each layer bears, one file."""
