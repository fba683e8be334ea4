"""The controller: the one process that advances releases and writes routes and ledger."""
