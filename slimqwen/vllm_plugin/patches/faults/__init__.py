"""Faults of vLLM on every device."""
