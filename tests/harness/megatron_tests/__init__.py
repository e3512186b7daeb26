"""Megatron-LM's own unit tests, natively and with every feature: what passes natively and not with the fused path."""
