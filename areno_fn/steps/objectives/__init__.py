"""Algorithms as arithmetic on numbers per decision: no model, no modality."""
