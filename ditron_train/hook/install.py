"""The ``.pth`` line that arms `ditron_train.hook` in every Python process of an environment.

Nothing is downloaded or run. The file is in ``site-packages``, where ``pip uninstall`` does not look: what it does
when the package is gone is to say so, once for each process in which ``DITRON`` is set.
"""

from __future__ import annotations

import os
import site
import sysconfig
from pathlib import Path

from ditron_train.hook import STARTUP, VARIABLE

FILE_NAME = "ditron_train_hook.pth"
_SOURCE = """try:
    from ditron_train.hook import arm
except ImportError:
    import sys
    sys.stderr.write("{variable} has no effect: ditron_train is not installed any more; delete {path}\\n")
else:
    arm()
"""


def _content(path: Path) -> str:
    """Python runs a line of a .pth file that begins with ``import``. Without the variable: one look-up."""
    source = _SOURCE.format(variable=VARIABLE, path=path)
    return f"import os; os.environ.get({VARIABLE!r}) and exec({source!r})\n"


def _folders() -> list[Path]:
    """Where Python looks for .pth files here."""
    folders = [sysconfig.get_path("purelib"), *site.getsitepackages()]
    return [Path(folder) for folder in dict.fromkeys([*folders, site.getusersitepackages()])]


def find_installed() -> list[Path]:
    """Every ``.pth`` file of the hook in this environment."""
    return [path for folder in _folders() if (path := folder / FILE_NAME).exists()]


def install() -> str:
    """Puts the line into ``site-packages``; returns what was done, in words. Idempotent.

    Raises:
        OSError: The folder cannot be written.
    """
    path = _folders()[0] / FILE_NAME
    content = _content(path)
    if path.exists() and path.read_text(encoding="utf-8") == content:
        return f"is installed already: {path}"
    path.write_text(content, encoding="utf-8")
    return f"installed: {path}; {VARIABLE}=tp,ep switches features on in any program of this environment"


def remove() -> str:
    """Deletes the line wherever it is in this environment; returns what was done, in words.

    Raises:
        OSError: A file cannot be deleted.
    """
    found = find_installed()
    for path in found:
        path.unlink()
    return f"removed: {', '.join(map(str, found))}" if found else "is not installed: nothing to remove"


def status() -> list[str]:
    """What arms the hook in processes that are started from here, and what it would switch on, in words."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    on_path = [folder for folder in folders if folder and Path(folder).resolve() == Path(STARTUP).resolve()]
    lines = [f"installed in this environment: {path}" for path in find_installed()]
    lines += [f"on PYTHONPATH: {folder}" for folder in on_path]
    lines = lines or [f"not installed, and not on PYTHONPATH (`PYTHONPATH={STARTUP}` for one job)"]
    value = os.environ.get(VARIABLE)
    return [*lines, f"{VARIABLE}={value}" if value else f"{VARIABLE} is not set: everything is native"]
