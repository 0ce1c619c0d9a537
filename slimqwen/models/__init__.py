"""The MTP head and the vocabulary of a Qwen3.5 checkpoint."""
