"""The ledger: every number of every revision, in DuckDB, fed by spool files."""
