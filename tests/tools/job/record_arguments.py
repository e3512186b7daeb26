"""Records the arguments of Megatron-LM's parsers in ``ditron_train/data/megatron_arguments.json``.

    python -m tests.tools.job.record_arguments CHECKOUT [CHECKOUT ...]

Checkouts are given from the oldest supported version to the newest, in an environment where Megatron-LM itself runs.
An argument is recorded as the oldest version that has it declares it; choices are those of all versions. Arguments of
``pretrain_gpt.py`` and ``pretrain_mamba.py`` are the same: those of ``megatron.training`` and of
``megatron.post_training``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[3] / "ditron_train" / "data" / "megatron_arguments.json"
_TYPES = {int: "int", float: "float"}


def _plain(value: Any) -> Any:
    """A default as JSON has it: enumerations by name."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or type(value) in (bool, int, float, str) else getattr(value, "name", str(value))


def declared(parser: argparse.ArgumentParser) -> dict[str, dict[str, Any]]:
    """Keywords of ``add_argument`` for every option."""
    found: dict[str, dict[str, Any]] = {}
    for action in parser._actions:
        kind = type(action).__name__
        for option in action.option_strings:
            entry: dict[str, Any] = {"dest": action.dest}
            if kind == "_HelpAction":
                continue
            if kind in ("_StoreTrueAction", "_StoreFalseAction", "BooleanOptionalAction"):
                is_off = kind == "_StoreFalseAction" or (
                    kind == "BooleanOptionalAction" and option.startswith("--no-")
                )
                entry["action"] = "store_false" if is_off else "store_true"
                natural = is_off if kind != "BooleanOptionalAction" else None
                if action.default is not natural:
                    entry["default"] = _plain(action.default)
            else:
                assert kind == "_StoreAction", (option, kind)
                if action.nargs is not None:
                    entry["nargs"] = action.nargs
                if action.type in _TYPES:
                    entry["type"] = _TYPES[action.type]
                if action.choices is not None:
                    entry["choices"] = [_plain(choice) for choice in action.choices]
                if action.default is not None:
                    entry["default"] = _plain(action.default)
            found[option] = entry
    return found


def of_checkout(checkout: Path) -> dict[str, dict[str, Any]]:
    """What one checkout declares, in a process of its own."""
    command = [sys.executable, "-m", "tests.tools.job.record_arguments", "--one", str(checkout)]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=PATH.parents[2]).stdout
    return json.loads(text.rpartition("\n===\n")[2])


def merged(versions: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """One table of all versions, the oldest first."""
    table: dict[str, dict[str, Any]] = {}
    for version in versions:
        for option, entry in version.items():
            known = table.setdefault(option, entry)
            if "choices" in known:
                known["choices"] = list(dict.fromkeys([*known["choices"], *entry.get("choices", ())]))
    return dict(sorted(table.items()))


def _one(checkout: Path) -> None:
    sys.path.insert(0, str(checkout))
    typing.override = getattr(typing, "override", lambda function: function)  # type: ignore[attr-defined]
    from megatron.post_training.arguments import add_modelopt_args
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    add_modelopt_args(parser)
    print("\n===\n" + json.dumps(declared(parser)))


def main(words: list[str]) -> None:
    """Records, or with ``--one`` prints what one checkout has."""
    if words[0] == "--one":
        return _one(Path(words[1]))
    table = merged([of_checkout(Path(word)) for word in words])
    lines = ",\n".join(f"{json.dumps(option)}: {json.dumps(entry)}" for option, entry in table.items())
    PATH.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
