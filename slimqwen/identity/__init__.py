"""What a result depends on, and whether it would be the same again: derived in one place, asked everywhere else."""
