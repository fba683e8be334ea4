"""Reports from ledger and catalog: HTML pages, plots and the answers of `graftwork why`."""
