"""Plans: vLLM's configuration for a variant on a GPU, predicted by its own code on a simulated one; known trouble."""
