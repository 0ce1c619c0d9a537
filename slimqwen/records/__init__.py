"""Measurement records: schemas, provenance, storage, and ways out of it.

Each module imports those before it: figures, table < record < split < provenance, registry < schemas < store <
collection, pairing < journal, mlflow_export. `settings` reads the files of eval/.
"""
