"""Engine modes: the combinations, the requests that they answer, and the record of their effects."""
