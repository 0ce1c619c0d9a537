"""Measurements of a served variant, and the statistics that compare two of them."""
