"""Slimqwen: recipes that turn a Qwen3.5 checkpoint into a smaller, faster variant, and the evidence for it."""
