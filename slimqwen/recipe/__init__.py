"""Recipe stages: each turns one checkpoint folder into another, and the runner chains them."""
