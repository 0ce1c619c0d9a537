"""Recipes: recipe.yaml, the contract of its stages, and the runner that chains them."""
