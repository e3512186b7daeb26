"""Jobs that are started together and train one after the other.

What a job imports takes longer than some of its steps. So ``compare`` starts all of its jobs at once; each of them
imports what it needs, and then waits before Megatron's set-up, before it touches a GPU, while its folder
(``--ditron-record``) holds a file.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from ditron_train.runtime.errors import DitronError

_POLL_S = 0.1


def _waiting(folder: Path) -> Path:
    return folder / "waiting"


def hold(folder: Path) -> None:
    """Has the job that is going to write into ``folder`` wait for ``release`` by this process.

    Raises:
        OSError: The folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _waiting(folder).write_text(str(os.getpid()), encoding="utf-8")


def release(folder: Path) -> None:
    """Lets that job go on; nothing if it does not wait."""
    _waiting(folder).unlink(missing_ok=True)


def wait_for_turn(folder: Path) -> None:
    """Returns when nobody holds the job that writes into ``folder``.

    Raises:
        DitronError: Who held it has ended.
    """
    while True:
        try:
            holder = int(_waiting(folder).read_text(encoding="utf-8") or 0)
        except (OSError, ValueError):
            return
        if holder and not _is_alive(holder):
            raise DitronError(
                f"{_waiting(folder)}: process {holder}, which was to say when this job may begin, has ended; without "
                "this file a job begins at once"
            )
        time.sleep(_POLL_S)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, on a machine that hides nothing else
    return True
