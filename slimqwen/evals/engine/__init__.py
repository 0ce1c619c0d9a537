"""Engine modes: the combinations, the requests they answer, and the record of what they change."""
