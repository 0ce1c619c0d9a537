"""Faults and slow paths of vLLM on a CPU."""
