"""Symmetric memory of a process group, and the channels (signals, epochs, deadlines) that ops use on it."""

from ditron_train.symm.arena import SymmetricArena, SymmetricTensor, close_all_arenas, get_arena
from ditron_train.symm.channel import Channel, check_all, forget_failed
from ditron_train.symm.nvshmem_transport import start_nvshmem

__all__ = [
    "Channel",
    "SymmetricArena",
    "SymmetricTensor",
    "check_all",
    "close_all_arenas",
    "forget_failed",
    "get_arena",
    "start_nvshmem",
]
