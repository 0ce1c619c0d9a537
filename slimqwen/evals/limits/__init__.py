"""Limits of the gate for a model, from the noise of its baseline: measured, recorded, and written into eval/."""
