"""``torchrun ... -m ditron_train.megatron.run pretrain_gpt.py <args> --ditron tp``: a Megatron script, unedited.

The script runs as it would on its own. When it imports ``megatron.training.arguments``, the ``--ditron`` group is
added to Megatron's parser; once the arguments are parsed, and so before any model is built, the features are switched
on. Its log lines begin with ``ditron_train:``, on standard error.
"""

from __future__ import annotations

import argparse
import functools
import importlib.abc
import importlib.machinery
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ditron_train.megatron.plugin.arguments import add_ditron_args, options_of
from ditron_train.megatron.plugin.switch import apply_options
from ditron_train.megatron.plugin.turns import wait_for_turn
from ditron_train.runtime.errors import SettingError, user_errors
from ditron_train.runtime.logs import get_logger, log_once

_ARGUMENTS = "megatron.training.arguments"
_USAGE = "torchrun ... -m ditron_train.megatron.run SCRIPT.py [its arguments] --ditron NAME[,NAME]"
_DESCRIPTION = (
    "Runs a Megatron training script as it is, with these arguments added to its own (SCRIPT.py --help shows all)."
)


def hook_argument_parser(module: ModuleType) -> None:
    """Make the parser in `module` (``megatron.training.arguments``) know ``--ditron``, and obey it once parsed."""
    if getattr(module, "_ditron_hooked", False):
        return
    native_add, native_parse = module.add_megatron_arguments, module.parse_args

    @functools.wraps(native_add)
    def add_megatron_arguments(parser: Any) -> Any:
        return add_ditron_args(native_add(parser))

    @functools.wraps(native_parse)
    def parse_args(*args: Any, **kwargs: Any) -> Any:
        parsed = native_parse(*args, **kwargs)
        options = options_of(parsed)
        if options.record is not None:
            wait_for_turn(Path(options.record))
        apply_options(options)
        return parsed

    vars(module).update(add_megatron_arguments=add_megatron_arguments, parse_args=parse_args, _ditron_hooked=True)


class _HookingLoader(importlib.abc.Loader):
    """Loads a module as its own loader does, then hooks it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        hook_argument_parser(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class _ArgumentsFinder(importlib.abc.MetaPathFinder):
    """Finds ``megatron.training.arguments`` where the other finders do, and hooks it when it is loaded."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != _ARGUMENTS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookingLoader(spec.loader)
        return spec


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script that `argv` (default ``sys.argv[1:]``) names, with the arguments that follow it.

    Raises:
        SettingError: No script is named, or it cannot be read.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in ("-h", "--help"):
        add_ditron_args(argparse.ArgumentParser(usage=_USAGE, description=_DESCRIPTION, add_help=False)).print_help()
        return
    if not words or words[0].startswith("-"):
        raise SettingError(f"the first argument has to be a script; usage: {_USAGE}")
    script = os.path.abspath(words[0])
    if not os.path.isfile(script):
        raise SettingError(f"cannot read the script {words[0]}")
    if not logging.getLogger().handlers and not get_logger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("ditron_train: %(message)s"))
        get_logger().addHandler(handler)
        get_logger().setLevel(logging.INFO)
        get_logger().propagate = False  # Megatron gives the root logger a handler of its own later

    sys.argv = [words[0], *words[1:]]
    sys.path.insert(0, os.path.dirname(script))  # as `python SCRIPT.py` would have it
    finder = _ArgumentsFinder()
    sys.meta_path.insert(0, finder)
    if _ARGUMENTS in sys.modules:
        hook_argument_parser(sys.modules[_ARGUMENTS])
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.meta_path.remove(finder)
    if _ARGUMENTS not in sys.modules:
        log_once(
            "no parser", f"{words[0]} never parsed Megatron's arguments: --ditron had no effect", level=logging.WARNING
        )


if __name__ == "__main__":
    with user_errors():
        main()
