"""What runs inside vLLM's processes. Imports nothing above `variant`."""
