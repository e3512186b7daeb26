"""Disks of a job's own, which can be filled and write-protected: where this process may mount any."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress
from pathlib import Path

from ditron_train.symm.shm_transport import FOLDER

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
_READ_ONLY, _PRIVATE, _RECURSIVE = 1, 1 << 18, 1 << 14
_SIZE = "64m"
_mounted: list[Path] = []


def mount_disks(*folders: Path) -> bool:
    """Gives this process, and those that it forks from now on, a small disk of their own for shared memory and for
    each of ``folders``; False where that is not allowed, and faults of disks are simulated."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) and not _become_root(libc):
        return False
    if libc.mount(b"none", b"/", None, _PRIVATE | _RECURSIVE, None):
        return False
    places = [Path(FOLDER), *folders]
    for place in places:
        if libc.mount(b"none", os.fsencode(place), b"tmpfs", 0, f"size={_SIZE}".encode()):
            return False
    _mounted[:] = places
    return True


def _become_root(libc: ctypes.CDLL) -> bool:
    """In a user namespace of its own."""
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_USER | _NEW_MOUNTS):
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError:
        return False
    return True


def fill_disks() -> None:
    """Leaves no byte on the job's disks; simulated where there are none."""
    if not _mounted:
        _pose(errno.ENOSPC)
    for place in _mounted:
        with suppress(OSError), open(place / "filled", "wb") as file:
            while True:
                file.write(b"\0" * 65536)
                file.flush()


def make_disks_read_only() -> None:
    """Nothing can be made on the job's disks any more; simulated where there are none."""
    if not _mounted:
        _pose(errno.EROFS)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for place in _mounted:  # on top of what is there, which is in use
        libc.mount(b"none", os.fsencode(place), b"tmpfs", _READ_ONLY, None)


def _pose(number: int) -> None:
    """Files of shared memory cannot be made by this process from now on."""

    def refuse(*arguments: object) -> None:
        raise OSError(number, os.strerror(number))

    os.posix_fallocate = refuse
