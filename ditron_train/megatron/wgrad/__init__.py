"""Megatron's gradient accumulation fusion without apex (feature ``wgrad``)."""
