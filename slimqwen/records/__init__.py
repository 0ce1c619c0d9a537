"""Measurement records: schemas, provenance, storage, and ways out of it.

Each module imports those before it: figures, panel, table < record < split < provenance, registry < schemas,
migrations < store < collection, pairing, differences < replay, journal, frame, mlflow_export. Only annotations of
`record` name classes of `collection` and `replay`.
"""
