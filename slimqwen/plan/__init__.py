"""Plans: what vLLM will be for a variant on a GPU, by its own code on a simulated one; known trouble."""
