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

from documents.tables import table

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

    defaults = {name: "unset" if one.default is None else f"`{one.default}`" for name, one in SETTINGS.items()}
    rows = [(f"`{one.variable}`", one.type_name, defaults[name], one.help) for name, one in SETTINGS.items()]
    return table(("variable", "value", "default", "what it does"), rows)


def versions() -> str:
    """The table of supported versions."""
    from ditron_train.runtime.versions import SUPPORTED

    needed = {True: "always", False: "optional"}
    rows = [(entry.name, f"`{entry.specifier}`", needed[entry.required], entry.why) for entry in SUPPORTED]
    return table(("library", "supported", "needed", "why"), rows)


def commands() -> str:
    """One section a command, with its options; the launcher's is the last."""
    from ditron_train.cli import command_parsers
    from ditron_train.megatron import add_ditron_args

    words = "``python -m ditron_train.megatron.run SCRIPT`` adds these to the script's own arguments."
    launcher = add_ditron_args(argparse.ArgumentParser(add_help=False, description=words))
    parsers = {f"`python -m ditron_train {name}`": parser for name, parser in command_parsers().items()}
    return "\n\n".join(_section(*named) for named in (*parsers.items(), ("The launcher's options", launcher)))


def _section(title: str, parser: argparse.ArgumentParser) -> str:
    words = " ".join((parser.description or "").replace("``", "`").split())
    return f"## {title}\n\n{words}\n\n{_options(parser)}".replace("\n\n\n", "\n")


def _options(parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction | argparse._VersionAction) or action.help == argparse.SUPPRESS:
            continue
        choices = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
        values = choices if action.metavar is None else action.metavar
        words = [*action.option_strings[:1], *([values] if isinstance(values, str) else values)]
        shown = words[0] if action.option_strings and action.nargs == 0 else " ".join(words).strip()
        rows.append((f"`{shown}`", (action.help or "") % {**vars(action), "prog": parser.prog}))
    return table(("option", "what it does"), rows) if rows else "It has no options."


def api() -> str:
    """One table a public module: each name and the first sentence of its description."""
    return "\n\n".join(_module_table(name) for name in PUBLIC_MODULES)


def _module_table(name: str) -> str:
    module = importlib.import_module(name)
    rows = [(f"`{public}`", _description(module, public)) for public in sorted(module.__all__, key=str.lower)]
    return f"## `{name}`\n\n{_first_sentence(inspect.getdoc(module))}\n\n{table(('name', 'what it is'), rows)}"


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


_ASKED = "unsupported"  # in the names of functions that give a reason
_FEATURES = ("all", "tp", "sp", "ep", "pp", "muon")
_ASKING = ("megatron/**/*.py", "optim/newton_schulz.py", "optim/options.py", "optim/plans.py")


def reasons() -> str:
    """All reasons to run natively, as the code gives them: a table a feature."""
    package, found = ROOT / "ditron_train", {name: set() for name in _FEATURES}
    for path in (path for part in _ASKING for path in package.glob(part)):
        feature = path.relative_to(package / "megatron").parts[0] if "megatron" in path.parts else "muon"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and _ASKED in node.name:
                texts = (text for answer in _answers(node) for text in _texts(answer))
                found[feature if feature in found else "all"].update(texts)
    tables = {name: table(("the log says",), ([text] for text in sorted(texts))) for name, texts in found.items()}
    return "\n\n".join(f"## `{name}`\n\n{table}" for name, table in tables.items())


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
