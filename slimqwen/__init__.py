"""Slimqwen: recipes that turn a Qwen checkpoint into a smaller, faster variant, and the evidence for it."""
