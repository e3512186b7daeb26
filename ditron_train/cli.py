"""The command line: ``ditron doctor``, ``ditron bench``, ... or ``python -m ditron_train doctor``.

Every command is a function that imports what it needs, so that ``--help`` is quick and works if nothing is
installed. `EXIT_STATUS` says what a command returns.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import logging
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

import ditron_train

EXIT_STATUS = (
    "exit status: 0 well; 1 the command found something wrong; 2 it could not be run as asked, or compared nothing of "
    "an op or a feature that it was asked for; 130 interrupted"
)
_REQUIRED = ("torch", "triton", "numpy", "packaging", "rich")
#: By command: its module, with ``add_arguments(parser)`` and ``run(arguments)``, and what it does.
_TOOLS = {
    "tune": ("tune.tuner", "choose tile sizes and transfers for this machine (under torchrun)"),
    "verify": ("verify.verifier", "compare every op with native, bit for bit (under torchrun)"),
    "compare": ("compare.comparison", "train twice by your own command, natively and fused"),
    "postmortem": ("postmortem.verdict", "name the first rank that diverged, after a failure"),
    "trace": ("trace.tracer", "record one call of an op: Chrome traces, and where the time went"),
    "predict": ("predict.predictor", "what a job would gain, from Megatron's arguments, without a GPU"),
    "report": ("report.report", "one archive with this machine's facts, for an issue"),
}
_UNDER_MEGATRON = ("bench", "tune", "verify", "trace")  # which run ops as jobs do
#: Commands that take Megatron's arguments after ``--``.
OF_JOBS = ("doctor", "predict", "tune", "verify")
_JOB_USAGE = "%(prog)s [options] [-- COMMAND, FILE OR MEGATRON'S ARGUMENTS]"


class _Parser(argparse.ArgumentParser):
    """Errors are one sentence, and an unknown argument comes with the nearest name."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(epilog=EXIT_STATUS, allow_abbrev=False, **keywords)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, rest = self.parse_known_args(args, namespace)
        if rest:
            self.error(f"unknown argument {rest[0]}{_advice(rest[0].partition('=')[0], self)}")
        return found

    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{message} ({self.prog} --help)")


def _advice(word: str, parser: argparse.ArgumentParser) -> str:
    """What was probably meant by an unknown argument."""
    known = list(parser._option_string_actions)
    if word in _REMOVED:
        return f": {_REMOVED[word]}"
    try:
        from ditron_train.tools.job.arguments import nearest

        if word.startswith("--") and nearest(word) == word:
            return ": Megatron's arguments follow a --"
    except ImportError:
        pass  # without torch only this command's own arguments are known
    found = difflib.get_close_matches(word, known, 1, 0.7)
    return f"; did you mean {found[0]}?" if found else ""


#: Options of earlier versions, and what to use.
_REMOVED = {"--picture": "predict draws no pictures any more; --json has its numbers"}


def _parser() -> argparse.ArgumentParser:
    is_script = os.path.basename(sys.argv[0]) == "ditron"
    prog = "ditron" if is_script else "python -m ditron_train"
    parser = _Parser(prog=prog, description=ditron_train.__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"ditron_train {ditron_train.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser(
        "doctor",
        usage=_JOB_USAGE,
        help="what works on this machine; with a job's arguments, what would be fused in it",
        description="Says what works on this machine, what does not, and the fix. With Megatron's arguments: which "
        "layers of that job would be fused, which stay native and why; that needs no GPU.",
    )
    doctor.add_argument("--job", metavar='"ARGUMENTS"', help="the same as arguments after --, in one word")
    doctor.add_argument("--json", action="store_true", help="machine-readable")
    doctor.add_argument("-v", "--verbose", action="store_true", help="also list arguments that have no effect here")
    doctor.add_argument(
        "--allow-unknown", action="store_true", help="pass over arguments that Megatron-LM does not have"
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

    from ditron_train.tools.bench import PACKAGES

    bench = commands.add_parser("bench", help="measure native, peers and fused (under torchrun)")
    benches = bench.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for name, text in PACKAGES.items():
        benches.add_parser(name, help=text, add_help=False).set_defaults(function=_bench)

    for name, (_, text) in _TOOLS.items():
        commands.add_parser(name, help=text, add_help=False).set_defaults(function=_tool)
    return parser


def _hook(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from ditron_train.hook import STARTUP
    from ditron_train.hook import install as hook

    if rest:
        arguments.parser.error(f"unknown argument {rest[0]}{_advice(rest[0], arguments.parser)}")
    actions = {"path": lambda: STARTUP, "install": hook.install, "remove": hook.remove}
    print(actions[arguments.action]() if arguments.action in actions else "\n".join(hook.status()))
    return 0


def _doctor(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    from ditron_train.tools.doctor.examination import examine

    if rest:
        arguments.parser.error(f"unknown argument {rest[0]}{_advice(rest[0], arguments.parser)}")
    warnings.simplefilter("ignore")  # of libraries that miss what a laptop does not have
    words = arguments.after_dashes if arguments.job is None else [arguments.job + " "]
    if not arguments.json:
        importlib.import_module("torch")  # for people: one line, which is what to do first
        print("reading Megatron's layers ..." if words else "examining this machine ...", file=sys.stderr, flush=True)
    if words is not None:
        from ditron_train.tools.doctor.job import examine_job

        found = examine_job(words, allow_unknown=arguments.allow_unknown)
        print(found.to_json() if arguments.json else found.to_text(verbose=arguments.verbose))
        return 0
    report = examine()
    print(report.to_json() if arguments.json else report.to_text())
    return 0 if report.healthy else 1


def _bench(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    arguments.command = f"bench {arguments.bench}"
    return _tool(arguments, rest)


def _tool(arguments: argparse.Namespace, rest: Sequence[str]) -> int:
    command = arguments.command
    if command.split()[0] in _UNDER_MEGATRON:
        _set_megatron_environment(as_a_job=command == "verify" and any(word.startswith("--plan") for word in rest))
    module, parser = _module_of(command)
    parsed = parser.parse_args(rest)
    parsed.job = arguments.after_dashes or []
    return module.run(parsed)


def _module_of(command: str) -> tuple[Any, argparse.ArgumentParser]:
    """A command's module, and the parser of its own options."""
    name = _TOOLS[command][0] if command in _TOOLS else command.replace(" ", ".")
    module = importlib.import_module(f"ditron_train.tools.{name}")
    usage = _JOB_USAGE if command in OF_JOBS else None
    text = (module.__doc__ or "").replace("``", "").replace("`", "")
    parser = _Parser(prog=f"{_parser().prog} {command}", description=text, usage=usage)
    module.add_arguments(parser)
    return module, parser


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """Every command with the parser of its own options; imports what the commands need."""
    from ditron_train.tools.bench import PACKAGES

    choices = _subcommands(_parser())
    tools = [*(f"bench {name}" for name in PACKAGES), *_TOOLS]
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


class _UsageError(Exception):
    """A command line that argparse let through and a command does not take."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    place = words.index("--") if words[:1] and words[0] in OF_JOBS and "--" in words else len(words)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("ditron_train").setLevel(logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING)
    try:
        parser = _parser()
        arguments, rest = parser.parse_known_args(words[:place])
        arguments.parser = parser
        arguments.after_dashes = words[place + 1 :] if place < len(words) else None
        return _run(arguments, rest)
    except _UsageError as error:
        return _fail(error)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _REQUIRED:
            raise
        from ditron_train.runtime.versions import pip_command

        return _fail(f"{missing} is not installed here; {pip_command(missing)}")


def _fail(error: object) -> int:
    from ditron_train.runtime.errors import say_error

    say_error(error)
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
    except PeerTimeoutError as error:  # not every rank meets it, and each names what it waited for
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (DitronError, OSError) as error:
        return _fail(error)
