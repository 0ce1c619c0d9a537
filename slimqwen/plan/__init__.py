"""Plans: vLLM's configuration for a variant on a GPU, predicted by vLLM's code on a simulated GPU; known trouble."""
