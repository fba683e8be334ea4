"""Statistics of quality: sequential tests, intervals, and the effect probe."""
