"""The command line: ``python -m ditron_train doctor``, ``bench``, ...

Every command is a function that imports what it needs, so that ``--help`` is quick and works where nothing is
installed. Exit status: 0 well, 1 the command found something wrong, 2 it could not be run as asked or compared nothing
of an op or a feature that it was asked for, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import ditron_train

_REQUIRED = ("torch", "triton", "numpy", "packaging", "rich")
#: By command: its module, with ``add_arguments(parser)`` and ``run(arguments)``, and what it does.
_TOOLS = {
    "tune": ("tune.tuner", "choose tile sizes and transfers for this machine (under torchrun)"),
    "verify": ("verify.verifier", "compare every op with native, bit for bit (under torchrun)"),
    "compare": ("compare.comparison", "train twice by your own command, natively and with ours"),
    "postmortem": ("postmortem.verdict", "name the first rank that diverged, after a failure"),
    "trace": ("trace.tracer", "draw what overlaps"),
    "predict": ("predict.predictor", "what a training step takes, from Megatron's arguments, without a GPU"),
}
_UNDER_MEGATRON = ("bench", "tune", "verify", "trace")  # which run ops as jobs do


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ditron_train", description=ditron_train.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"ditron_train {ditron_train.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what works on this machine, what does not, and the fix")
    doctor.add_argument("--json", action="store_true", help="machine-readable")
    doctor.add_argument(
        "--job",
        metavar='"ARGUMENTS"',
        help="instead of this machine: which layers of the job that pretrain_gpt.py's own arguments describe become "
        "fast, which stay native and why; needs no GPU",
    )
    doctor.set_defaults(function=_doctor)

    hook = commands.add_parser("hook", help="DITRON=tp in the environment is enough: install, remove, show")
    hook.add_argument(
        "action",
        choices=("path", "install", "remove", "status"),
        help="path: prints a folder for PYTHONPATH (for one job); install, remove: a .pth line in this environment "
        "(for every job); status: what is there",
    )
    hook.set_defaults(function=_hook)

    from ditron_train.tools.bench import available_benches

    bench = commands.add_parser("bench", help="measure native, peers and ours (under torchrun)")
    rooms = bench.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, text in available_benches().items():
        rooms.add_parser(name, help=text, add_help=False).set_defaults(function=_bench)

    for name, (_, text) in _TOOLS.items():
        commands.add_parser(name, help=text, add_help=False).set_defaults(function=_tool)
    return parser


def _hook(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from ditron_train.hook import STARTUP
    from ditron_train.hook import install as hook

    _refuse(rest)
    actions = {"path": lambda: STARTUP, "install": hook.install, "remove": hook.remove}
    print(actions[arguments.action]() if arguments.action in actions else "\n".join(hook.status()))
    return 0


def _doctor(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from ditron_train.tools.doctor import examine, show

    _refuse(rest)
    warnings.simplefilter("ignore")  # of libraries that miss what a laptop does not have
    if arguments.job is not None:
        return _doctor_job(arguments)
    if not arguments.json:
        importlib.import_module("torch")  # for people: one line, which is what to do first
    report = examine()
    print(report.to_json()) if arguments.json else show(report)
    return 0 if report.healthy else 1


def _doctor_job(arguments: argparse.Namespace) -> int:
    try:
        from ditron_train.tools.doctor.job import examine_job, show_job

        report = examine_job(arguments.job)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        from ditron_train.runtime.versions import pip_command

        raise _UsageError(f"--job needs megatron-core; {pip_command('megatron-core')}") from None
    print(report.to_json()) if arguments.json else show_job(report)
    return 0


def _bench(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    arguments.command = f"bench {arguments.bench}"
    return _tool(arguments, rest)


def _tool(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    command = arguments.command
    if command.split()[0] in _UNDER_MEGATRON:
        _set_megatron_environment(as_a_job=command == "verify" and any(word.startswith("--plan") for word in rest))
    module, parser = _module_of(command)
    return module.run(parser.parse_args(rest))


def _module_of(command: str) -> tuple[Any, argparse.ArgumentParser]:
    """A command's module, and the parser of what stands behind the command."""
    name = _TOOLS[command][0] if command in _TOOLS else command.replace(" ", ".")
    module = importlib.import_module(f"ditron_train.tools.{name}")
    parser = argparse.ArgumentParser(
        prog=f"python -m ditron_train {command}", description=module.__doc__, allow_abbrev=False
    )
    module.add_arguments(parser)
    return module, parser


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command with the parser of its own options; imports what the commands need."""
    from ditron_train.tools.bench import available_benches

    choices = _subcommands(_parser())
    tools = [*(f"bench {name}" for name in available_benches()), *_TOOLS]
    return {
        "doctor": choices["doctor"],
        "hook": choices["hook"],
        **{command: _module_of(command)[1] for command in tools},
    }


def _subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (action,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return dict(action.choices)


def _set_megatron_environment(*, as_a_job: bool = False) -> None:
    """Megatron's own settings, read when CUDA and Transformer Engine start; they are part of the results' stamp, and
    of a plan: one that is made ``as_a_job`` would make it must not depend on what jobs rarely set."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if not as_a_job:
        os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    warnings.simplefilter("ignore")  # of the libraries that are measured; what matters here is logged


def _refuse(rest: Sequence[str]) -> None:
    if rest:
        raise _UsageError(f"unknown arguments: {' '.join(rest)}")


class _UsageError(Exception):
    """A command line that argparse let through and a command does not take."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    arguments, rest = _parser().parse_known_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("ditron_train").setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    try:
        return _run(arguments, rest)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _REQUIRED:
            raise
        from ditron_train.runtime.versions import pip_command

        print(f"error: {missing} is not installed here; {pip_command(missing)}", file=sys.stderr)
        return 2


def _run(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from ditron_train.runtime.errors import DitronError, PeerTimeoutError

    try:
        return arguments.function(arguments, rest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (DitronError, _UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, PeerTimeoutError) else 2
