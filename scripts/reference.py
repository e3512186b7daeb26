"""The generated parts of ``docs/``: settings, versions, command lines, public names, reasons to run natively.

``python scripts/readme.py`` puts them between their marks.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args, get_origin

ROOT = Path(__file__).resolve().parent.parent

#: Modules whose public names are for users, in the order of the page.
PUBLIC_MODULES = (
    "ditron_train.megatron",
    "ditron_train.tp",
    "ditron_train.sp",
    "ditron_train.ep",
    "ditron_train.pp",
    "ditron_train.optim",
    "ditron_train.symm",
    "ditron_train.stream",
    "ditron_train.lang",
    "ditron_train.schedule",
    "ditron_train.runtime.errors",
    "ditron_train.runtime.settings",
)


def settings() -> str:
    """The table of all environment variables."""
    from ditron_train.runtime.settings import SETTINGS

    lines = ["| variable | value | default | what it does |", "| --- | --- | --- | --- |"]
    for setting in SETTINGS.values():
        default = "unset" if setting.default is None else f"`{setting.default}`"
        lines.append(f"| `{setting.variable}` | {setting.type_name} | {default} | {_cell(setting.help)} |")
    return "\n".join(lines)


def versions() -> str:
    """The table of supported versions."""
    from ditron_train.runtime.versions import SUPPORTED

    lines = ["| library | supported | needed | why |", "| --- | --- | --- | --- |"]
    for entry in SUPPORTED:
        needed = "always" if entry.required else "optional"
        lines.append(f"| {entry.name} | `{entry.specifier}` | {needed} | {_cell(entry.why)} |")
    return "\n".join(lines)


def commands() -> str:
    """One section a command, with its options."""
    from ditron_train.cli import command_parsers

    sections = [_section(name, parser) for name, parser in command_parsers().items()]
    return "\n\n".join([*sections, _section_of_launcher()])


def _section(name: str, parser: argparse.ArgumentParser) -> str:
    words = " ".join((parser.description or "").replace("``", "`").split())
    return f"## `python -m ditron_train {name}`\n\n{words}\n\n{_options(parser)}".replace("\n\n\n", "\n")


def _section_of_launcher() -> str:
    from ditron_train.megatron import add_ditron_args

    parser = add_ditron_args(argparse.ArgumentParser(add_help=False))
    words = "`python -m ditron_train.megatron.run SCRIPT` adds these to the script's own arguments."
    return f"## The launcher's options\n\n{words}\n\n{_options(parser)}"


def _options(parser: argparse.ArgumentParser) -> str:
    lines = ["| option | what it does |", "| --- | --- |"]
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction) or action.help == argparse.SUPPRESS:
            continue
        values = action.metavar if action.metavar is not None else _choices(action)
        names = action.option_strings or [str(values or action.dest)]
        shown = f"{names[0]} {_words(values)}".strip() if action.option_strings and action.nargs != 0 else names[0]
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        lines.append(f"| `{shown.replace('|', chr(92) + '|')}` | {_cell(text)} |")
    return "\n".join(lines) if len(lines) > 2 else "It has no options."


def _choices(action: argparse.Action) -> str:
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()


def _words(values: str | tuple[str, ...] | None) -> str:
    return " ".join(values) if isinstance(values, tuple) else str(values or "")


def api() -> str:
    """One table a public module: each name and the first sentence of its description."""
    return "\n\n".join(_module_table(name) for name in PUBLIC_MODULES)


def _module_table(name: str) -> str:
    module = importlib.import_module(name)
    lines = [f"## `{name}`", "", _first_sentence(inspect.getdoc(module)), "", "| name | what it is |", "| --- | --- |"]
    for public in sorted(module.__all__, key=str.lower):
        lines.append(f"| `{public}` | {_cell(_description(module, public))} |")
    return "\n".join(lines)


def _description(module: object, name: str) -> str:
    value = getattr(module, name)
    value = getattr(value, "fn", value)  # a kernel's Python function
    if inspect.isclass(value) or inspect.isroutine(value):
        return _first_sentence(value.__doc__ and inspect.cleandoc(value.__doc__))
    if get_origin(value) is Literal:
        return "One of " + ", ".join(f"`{choice}`" for choice in get_args(value)) + "."
    return f"A constant of type `{type(value).__name__}`."


def _first_sentence(text: str | None) -> str:
    paragraph = " ".join((text or "").split("\n\n")[0].split()).replace("``", "`")
    found = re.match(r"(.+?\.)(?= [A-Z`(\[]|$)", re.sub(r"^Layer \d: ", "", paragraph))
    return found.group(1) if found else paragraph


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


_ASKED = (
    "unsupported",
    "unsupported_reason",
    "unsupported_reason_hidden",
)  # in the names of functions that give a reason
_FEATURES = ("all", "tp", "sp", "ep", "pp", "muon")
_ASKING = ("megatron", "optim/newton_schulz.py", "optim/options.py", "optim/plans.py")


def reasons() -> str:
    """All reasons to run natively, as the code gives them: a table a feature."""
    package, found = ROOT / "ditron_train", {name: set() for name in _FEATURES}
    files = [
        path for part in _ASKING for path in ([package / part] if ".py" in part else (package / part).rglob("*.py"))
    ]
    for path in files:
        feature = path.relative_to(package / "megatron").parts[0] if "megatron" in path.parts else "muon"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and any(word in node.name for word in _ASKED):
                texts = (text for answer in _answers(node) for text in _texts(answer))
                found[feature if feature in found else "all"].update(map(_cell, texts))
    return "\n\n".join(
        "\n".join(
            [f"## `{name}`", "", "| the log says |", "| --- |", *(f"| {text} |" for text in sorted(found[name]))]
        )
        for name in _FEATURES
    )


def _answers(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What a function returns, or calls its reason."""
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value
        elif isinstance(node, ast.Assign) and any(ast.unparse(target) == "reason" for target in node.targets):
            yield node.value


def _texts(answer: ast.expr) -> Iterator[str]:
    """The sentences in an expression; what is filled in as dots."""
    if isinstance(answer, ast.Constant) and isinstance(answer.value, str):
        yield answer.value
    elif isinstance(answer, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in answer.values)
    elif isinstance(answer, ast.IfExp):
        yield from (text for part in (answer.body, answer.orelse) for text in _texts(part))
    elif isinstance(answer, ast.BoolOp):
        yield from (text for part in answer.values for text in _texts(part))


#: Document: its generated parts.
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "docs/reference/settings.md": {"settings": settings},
    "docs/reference/reasons.md": {"reasons": reasons},
    "docs/reference/versions.md": {"versions": versions},
    "docs/reference/command-line.md": {"commands": commands},
    "docs/reference/api.md": {"api": api},
}
