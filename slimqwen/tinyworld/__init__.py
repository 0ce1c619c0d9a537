"""The embedded default: a procedural world, its tokenizer, its trained tiny Qwen3.5 and its tasks."""
