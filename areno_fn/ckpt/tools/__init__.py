"""What `python -m areno_fn.ckpt` does: compare, inspect, verify and convert checkpoints of every kind."""
