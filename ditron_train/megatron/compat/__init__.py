"""What differs between the versions of Megatron-core that are supported, and what of a newer one is not covered yet.

Everything that asks for a version's own names is here: features ask these functions.
"""
