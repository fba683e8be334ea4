"""A simulation of many engines of one base: placement of policies, batches, host tiers, what users see."""
