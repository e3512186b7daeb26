"""Deterministic mode without the fill of new tensors, if the job shows that no bit depends on it (feature
``det``)."""
