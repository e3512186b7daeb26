"""Ulysses attention (feature ``sp``)."""
