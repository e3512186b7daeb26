"""Imported by Python at its start if this folder is on ``PYTHONPATH``: arms `ditron_train.hook`.

Then the ``sitecustomize`` that this one hides is imported, if there is one.
"""

import importlib.machinery
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _run_hidden() -> None:
    folders = [os.path.abspath(folder) for folder in sys.path]
    behind = folders[folders.index(_FOLDER) + 1 :] if _FOLDER in folders else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", behind)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


try:
    from ditron_train.hook import arm
except ImportError:  # a checkout that is not installed: its root comes last on the path
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(_FOLDER))))
    from ditron_train.hook import arm
arm()
_run_hidden()
