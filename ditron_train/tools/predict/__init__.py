"""Tool: what a training step takes, natively and with ours, from Megatron's arguments and a profile of the machine."""
