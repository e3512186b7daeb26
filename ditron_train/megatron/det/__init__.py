"""Deterministic mode without the fill of new tensors, where the job shows that no bit depends on it (feature
``det``)."""
