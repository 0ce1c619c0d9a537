"""Measurement records: schemas, provenance, storage, and the tables generated from them."""
