"""find_precision: which precision a model wants, found out in a rehearsal."""
