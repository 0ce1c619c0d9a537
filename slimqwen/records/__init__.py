"""Measurement records: schemas, provenance, storage, pairing and export.

Modules import only modules further left: fitted_table < figures, table < record < split < provenance, registry <
schemas < store < collection, pairing < journal, mlflow_export. `settings` reads the files of eval/.
"""
