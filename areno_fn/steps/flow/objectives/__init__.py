"""Losses of flow matching: stages that return `Sums`."""
