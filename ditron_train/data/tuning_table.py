"""Tuning tables: what was measured to be quickest on one kind of GPU, by group size, op and shape class.

One readable JSON file a device, written by ``python -m ditron_train tune``:

    {"format": ..., "device": "NVIDIA H200", "made_with": {...}, "rates": {...},
     "choices": {"4 ranks": {"ag_gemm nt": {"8192x3072x4096": {"tile": "128x256x64", ...}}}}}

What an entry's fields mean is for the op's subpackage to say (``tp.choices``). A shape class is the GEMM's m, n and k
as one rank sees them, each rounded up to the next 2^i or 3 * 2^(i - 1).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

from ditron_train.data.rates import RETIRED_RATES, MachineRates
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.files import parse_json, read_regular, save_text
from ditron_train.runtime.settings import get_settings

_FORMAT = "ditron_train tuning 1"

Entry = dict[str, Any]


def class_of_size(size: int) -> int:
    """``size`` rounded up to the next 2^i or 3 * 2^(i - 1)."""
    power = 1 << max(size - 1, 0).bit_length()
    return 3 * power // 4 if power >= 4 and size <= 3 * power // 4 else power


def shape_class(m: int, n: int, k: int) -> str:
    """The class of a GEMM [m, k] @ [k, n], such as ``8192x3072x4096`` of 8192x2752x4096."""
    return "x".join(str(class_of_size(size)) for size in (m, n, k))


@dataclass
class TuningTable:
    """Choices and rates of one kind of device.

    Attributes:
        device: Name of the GPU they hold for.
        made_with: Versions and date, for people.
        rates: What the cost model computes with; None if they were not measured.
        choices: Entries by ``"<world size> ranks"``, op with layout, and shape class.
    """

    device: str
    made_with: dict[str, str] = field(default_factory=dict)
    rates: MachineRates | None = None
    choices: dict[str, dict[str, dict[str, Entry]]] = field(default_factory=dict)

    def find(self, op: str, world_size: int, shape: str) -> Entry | None:
        """The entry of ``op`` (with its layout) at a shape class, None if nothing was measured."""
        return self.choices.get(f"{world_size} ranks", {}).get(op, {}).get(shape)

    def put(self, op: str, world_size: int, shape: str, entry: Mapping[str, Any]) -> None:
        """Sets an entry; what was there is replaced."""
        self.choices.setdefault(f"{world_size} ranks", {}).setdefault(op, {})[shape] = dict(entry)

    def to_text(self) -> str:
        """The file: one line an entry, sorted."""
        sections = []
        for ranks, ops in sorted(self.choices.items(), key=lambda item: _sizes(item[0])):
            blocks = []
            for op, shapes in sorted(ops.items()):
                lines = [
                    f'    "{shape}": {json.dumps(entry)}'
                    for shape, entry in sorted(shapes.items(), key=lambda i: _sizes(i[0]))
                ]
                blocks.append(f'   "{op}": {{\n' + ",\n".join(lines) + "\n   }")
            sections.append(f'  "{ranks}": {{\n' + ",\n".join(blocks) + "\n  }")
        head: dict[str, Any] = {"format": _FORMAT, "device": self.device, "made_with": self.made_with}
        head["rates"] = None if self.rates is None else asdict(self.rates)
        lines = [f' "{name}": {json.dumps(value)}' for name, value in head.items()]
        return "{\n" + ",\n".join(lines) + ',\n "choices": {\n' + ",\n".join(sections) + "\n }\n}\n"

    def save(self, path: Path) -> None:
        """Writes the file at once, so that no reader sees half of it.

        Raises:
            SettingError: The path cannot be written.
        """
        save_text(path, self.to_text(), "the tuning table")


def _sizes(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]


def parse_table(text: str, name: str) -> TuningTable:
    """The table that a file called ``name`` holds as ``text``.

    Raises:
        SettingError: It is no table.
    """
    try:
        content = parse_json(text)
    except ValueError:
        raise SettingError(f"{name} is not a tuning table: no JSON") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise SettingError(f"{name} is not a tuning table of this version ({_FORMAT!r})")
    try:
        rates = content["rates"] and {k: v for k, v in content["rates"].items() if k not in RETIRED_RATES}
        known = {f.name for f in fields(MachineRates)}
        if rates is not None and not (set(rates) <= known and all(_is_rate(value) for value in rates.values())):
            raise TypeError
        choices = content["choices"]
        entries = [entry for ops in choices.values() for shapes in ops.values() for entry in shapes.values()]
        if not all(isinstance(entry, dict) for entry in entries) or not isinstance(content["device"], str):
            raise TypeError
        return TuningTable(content["device"], content["made_with"], MachineRates(**rates) if rates else None, choices)
    except (KeyError, TypeError, AttributeError):
        raise SettingError(
            f"the tuning table {name} cannot be read: make it anew with python -m ditron_train tune"
        ) from None


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")


def _content(path: Path | str) -> bytes:
    try:
        return read_regular(Path(path))
    except OSError as error:
        raise SettingError(f"cannot read the tuning table {path}: {error.strerror}") from None


def _read(path: Path) -> TuningTable:
    try:
        return parse_table(_content(path).decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise SettingError(f"cannot read the tuning table {path}: {error}") from None


def read_table(path: Path, device: str) -> TuningTable:
    """Reads a table made for ``device``.

    Raises:
        SettingError: The file cannot be read, is no table, or was made on another kind of device.
    """
    table = _read(path)
    if table.device != device:
        raise SettingError(
            f"the tuning table {path} was made on {table.device}, this is {device}: make one here, or name another"
        )
    return table


def shipped_name(device: str) -> str:
    """File name of a device's table in the package's data, such as ``nvidia-h200.json``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") + ".json"


def check_table() -> None:
    """Reads the file that ``DITRON_TUNING`` names, if it names one; for which device it is, is asked at its first use.

    Raises:
        SettingError: It cannot be read or is no table.
    """
    setting = get_settings().tuning
    if setting not in (None, "off"):
        _read(Path(setting))


def named_table() -> str | None:
    """What ``DITRON_TUNING`` says, a file by its content, such as ``table 1f3a5c7e9b0d``; None if it is unset.

    Raises:
        SettingError: The file cannot be read.
    """
    setting = get_settings().tuning
    if setting in (None, "off"):
        return setting
    return f"table {hashlib.sha256(_content(setting)).hexdigest()[:12]}"


_tables: dict[tuple[str | None, str], TuningTable | None] = {}


def forget_tables() -> None:
    """Read tables again at their next use."""
    _tables.clear()


def active_table(device: str) -> TuningTable | None:
    """The table to choose by: the user's (``DITRON_TUNING``), else the one that ships for ``device``, else None.

    Raises:
        SettingError: The user's file cannot be read, is no table, or was made on another kind of device.
    """
    setting = get_settings().tuning
    key = (setting, device)
    if key not in _tables:
        _tables[key] = _load(setting, device)
    return _tables[key]


def tuned_count(device: str, op: str, world_size: int, shape: str, name: str) -> int | None:
    """The number that the active table's entry of a shape class holds as ``name``; None if nothing was measured.

    Raises:
        SettingError: As ``active_table``, or the entry has no such number.
    """
    table = active_table(device)
    entry = None if table is None else table.find(op, world_size, shape)
    if entry is None:
        return None
    count = entry.get(name)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        where = f"{world_size} ranks, {op}, {shape}"
        raise SettingError(f"the tuning table's entry of {where} cannot be read: {name} is {count!r}")
    return count


def _load(setting: str | None, device: str) -> TuningTable | None:
    if setting == "off":
        return None
    if setting is not None:
        return read_table(Path(setting), device)
    shipped = resources.files("ditron_train.data").joinpath("tuning") / shipped_name(device)
    return parse_table(shipped.read_text(encoding="utf-8"), shipped.name) if shipped.is_file() else None
