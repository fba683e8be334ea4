"""Reports: what ledger and catalog hold, as pages, plots and answers to `why`."""
