"""Tool: what a job would gain, from Megatron's arguments, op costs and the step time that the user states."""
