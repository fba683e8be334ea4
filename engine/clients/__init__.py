"""HTTP clients, one for each service; they raise a service's errors as our own classes."""
