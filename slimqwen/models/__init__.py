"""Qwen models: families as data, dimensions, loading, the MTP head, vocabularies, the error of quantised layers."""
