"""Megatron's distributed optimizer with Adam in one pass (feature ``adam``)."""
