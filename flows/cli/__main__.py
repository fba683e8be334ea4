"""`python -m flows.cli`, the same as `graftwork`."""

from flows.cli import main

main()
