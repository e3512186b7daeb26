"""Whether Megatron's products give the same bits for any batch: a switch that 0.16.0rc0 does not have yet."""

try:
    from megatron.core.transformer.custom_layers.batch_invariant_kernels import is_batch_invariant_mode_enabled
except ImportError:

    def is_batch_invariant_mode_enabled() -> bool:
        """Never, in this version."""
        return False
