"""Why the engine does not reproduce a revision: its parts, asked of engine and trainer."""
