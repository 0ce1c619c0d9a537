"""Sweeps: the same measurements of many variants, as tasks of an executor."""
