"""Where the checkout that is tested lies."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
