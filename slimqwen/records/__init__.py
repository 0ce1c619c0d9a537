"""Measurement records: schemas, provenance, storage, and ways out of it."""
