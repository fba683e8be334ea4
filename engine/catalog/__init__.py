"""The catalog: durable index of bases, policies, revisions, routes and releases."""
