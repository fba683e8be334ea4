"""Statistics of quality: sequential evidence, estimates, and the effect probe."""
