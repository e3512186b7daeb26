"""Megatron's Muon (feature ``muon``)."""
