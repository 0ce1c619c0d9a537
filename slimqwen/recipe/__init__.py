"""Recipes: recipe.yaml, the interface of stages, the stages themselves, and the runner that runs them in order."""
