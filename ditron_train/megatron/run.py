"""``torchrun ... -m ditron_train.megatron.run SCRIPT.py <args> --ditron tp``: a training script, unedited.

The script runs as it would on its own, without the ``--ditron`` words in its ``sys.argv``. A script of Megatron-LM's
parses them as arguments of its own: when it imports ``megatron.training.arguments``, the ``--ditron`` group is added
to Megatron's parser, and the features are switched on once the arguments are parsed. In any other program that trains
with megatron-core the hook does it (`ditron_train.hook`), also in processes that the program starts. Log lines begin
with ``ditron_train:``, on standard error.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ditron_train.hook import STARTUP, VARIABLE, after_import, arm, has_built
from ditron_train.megatron.plugin.arguments import Options, add_ditron_args, options_of
from ditron_train.megatron.plugin.job_gate import wait_for_turn
from ditron_train.megatron.plugin.switch import apply_options
from ditron_train.runtime.errors import SettingError, user_errors
from ditron_train.runtime.logs import get_logger, log_once

_ARGUMENTS = "megatron.training.arguments"
_USAGE = "torchrun ... -m ditron_train.megatron.run SCRIPT.py [its arguments] --ditron NAME[,NAME]"
_DESCRIPTION = (
    "Runs a training script as it is, with these arguments (of Megatron-LM's scripts SCRIPT.py --help shows all)."
)


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line that are the launcher's, and those of the script."""
    group = add_ditron_args(argparse.ArgumentParser(add_help=False))
    names = {name for action in group._actions for name in action.option_strings}
    own: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        if word.partition("=")[0] not in names:
            others.append(word)
        else:  # each takes one value
            own += [word] if "=" in word else [word, *itertools.islice(rest, 1)]
    return own, others


def hook_argument_parser(module: ModuleType, given: argparse.Namespace) -> None:
    """Makes the parser in `module` (``megatron.training.arguments``) know ``--ditron``, with the values that the
    launcher was ``given``, and obey it once parsed."""
    if getattr(module, "_ditron_hooked", False):
        return
    native_add, native_parse = module.add_megatron_arguments, module.parse_args

    @functools.wraps(native_add)
    def add_megatron_arguments(parser: Any) -> Any:
        parser = add_ditron_args(native_add(parser))
        parser.set_defaults(**vars(given))
        return parser

    @functools.wraps(native_parse)
    def parse_args(*args: Any, **kwargs: Any) -> Any:
        parsed = native_parse(*args, **kwargs)
        if not hasattr(parsed, "ditron"):  # read from a YAML file
            vars(parsed).update(vars(given))
        options = options_of(parsed)
        if options.record is not None:
            wait_for_turn(Path(options.record))
        apply_options(options)
        return parsed

    vars(module).update(add_megatron_arguments=add_megatron_arguments, parse_args=parse_args, _ditron_hooked=True)


def _arm(options: Options) -> None:
    """Has the hook switch the features on, here and in processes that are started from here."""
    if options.features:
        os.environ.update(options.environment())
        os.environ[VARIABLE] = ",".join(options.features)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (STARTUP, os.environ.get("PYTHONPATH"))))
        unrecorded = dataclasses.replace(options, record=None, record_trace=None)  # Megatron-LM's loop alone is
        arm(lambda: apply_options(unrecorded))
    else:
        arm()


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

    own, others = split_words(words[1:])
    given = add_ditron_args(argparse.ArgumentParser(usage=_USAGE, allow_abbrev=False)).parse_args(own)
    options = options_of(given)
    sys.argv = [words[0], *others]
    sys.path.insert(0, os.path.dirname(script))  # as `python SCRIPT.py` would have it
    _arm(options)
    after_import(_ARGUMENTS, functools.partial(hook_argument_parser, given=given))
    runpy.run_path(script, run_name="__main__")
    if options.features and not has_built():
        text = f"{words[0]} built no model of Megatron's in this process: --ditron had no effect here"
        log_once("no model", text, level=logging.WARNING)
    if options.record is not None and _ARGUMENTS not in sys.modules:
        text = f"{words[0]} is no script of Megatron-LM's: --ditron-record had no effect"
        log_once("no record", text, level=logging.WARNING)


if __name__ == "__main__":
    with user_errors(exits=False):
        main()
