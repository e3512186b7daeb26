"""Which Megatron-core the tests run beside, told without importing it."""

from ditron_train.runtime.versions import find_versions

__all__ = ["is_newer_than_0_17"]


def is_newer_than_0_17() -> bool:
    """Whether Muon is built by a registry, whose module is imported with megatron-core."""
    version = find_versions()["megatron-core"]
    return version is not None and tuple(map(int, version.split(".")[:2])) > (0, 17)
