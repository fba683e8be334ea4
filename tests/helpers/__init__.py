"""What tests and benchmarks share: services, made adapters, references, fakes at the boundary."""
