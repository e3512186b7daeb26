"""Tensor parallel linear layers (feature ``tp``)."""
