"""Token models: packing, sampling, scoring and rollouts."""
