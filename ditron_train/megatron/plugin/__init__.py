"""How features get into megatron-core: launcher, arguments, specs, patches, one point that every rank passes."""
