"""Every ``DITRON_*`` environment variable, stated once, in ``ditron_train/data/settings.json``.

``SETTINGS`` is that table, from which ``docs/reference/settings.md`` is made; ``get_settings()`` reads the environment
at the time of the call, so nothing is read from it on import and a test can set a variable.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from typing import Any

from ditron_train.runtime.errors import SettingError

__all__ = ["SETTINGS", "Setting", "Settings", "get_settings", "under_policy", "unknown_variables"]


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """Parses a word that is one of a few."""

    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be one of {', '.join(choices)}")
        return text

    return parse


@dataclass(frozen=True)
class Setting:
    """One environment variable, an entry of ``ditron_train/data/settings.json``.

    Attributes:
        variable: Its name.
        default: Its value when it is unset.
        help: What it does.
        choices: Its values, if they are a few words.
        parse: If they are not, which entry of ``_PARSERS`` reads a value.
        kind: What a value is then, in a word or two.
        former: Its old name, which is still read, with a warning.
    """

    variable: str
    default: Any
    help: str
    choices: Sequence[str] = ()
    parse: str = "text"
    kind: str = ""
    former: str | None = None

    @property
    def parser(self) -> Callable[[str], Any]:
        """Reads a value from text, raises `ValueError`."""
        return _one_of(self.choices) if self.choices else _PARSERS[self.parse]

    @property
    def type_name(self) -> str:
        """What a value is."""
        return ", ".join(self.choices) or self.kind


def _number(kind: Callable[[str], Any], allowed: Callable[[Any], bool], words: str) -> Callable[[str], Any]:
    """Parses a number of a ``kind`` (``float`` or ``int``); what is none gets the same ``words`` as one that is not
    allowed."""

    def parse(text: str) -> Any:
        with suppress(ValueError):
            value = kind(text)
            if allowed(value):
                return value
        raise ValueError(f"must be {words}")

    return parse


# The largest leave room for a product of two of them: what is counted in nanoseconds, bytes or rows stays a number.
_MOST, _MOST_COUNT = 1e30, 2**31 - 1


_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}


def _num_bytes(text: str) -> int:
    digits = text.strip().rstrip("kKmMgGiIbB")
    unit = text.strip()[len(digits) :].lower()
    if unit in ("b",):
        unit = ""
    with suppress(ValueError, OverflowError):
        value = int(float(digits) * _UNITS.get(unit, 0))
        if value > 0:
            return value
    raise ValueError("must be a size above 0 such as 268435456, 256M or 2GiB")


#: What reads the values that are not a few words, by its name in ``settings.json``.
_PARSERS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "bytes": _num_bytes,
    "positive number": _number(float, lambda value: 0 < value <= _MOST, f"a number above 0, at most {_MOST:g}"),
    "seconds": _number(float, lambda value: 0.001 <= value <= _MOST, f"a number of seconds from 0.001 to {_MOST:g}"),
    "positive count": _number(int, lambda value: 0 < value <= _MOST_COUNT, f"a whole number from 1 to {_MOST_COUNT}"),
    "count": _number(int, lambda value: 0 <= value <= _MOST_COUNT, f"a whole number from 0 to {_MOST_COUNT}"),
}


@dataclass(frozen=True)
class Settings:
    """Values of all settings at one moment, by the names that they have in ``settings.json``, which describes them."""

    features: str | None
    transport: str
    timeout_s: float
    arena_bytes: int | None
    pp_slots: int
    pp_leases: int | None
    pp_path: str
    muon_sharding: str
    policy: str
    plan: str | None
    rows: int | None
    audit: int
    tuning: str | None
    ep_capacity: float | None
    ep_rails: str
    fp8_rows: str
    wgrad: str
    loss: str
    det: str
    batch_numbers: str
    postmortem: str | None
    versions: str


#: All of them, by name of the field.
SETTINGS: dict[str, Setting] = {
    name: Setting(**entry)
    for name, entry in json.loads(
        resources.files("ditron_train").joinpath("data/settings.json").read_text("utf-8")
    ).items()
}


def _by_former_name(setting: Setting) -> str | None:
    text = os.environ.get(setting.former or "")
    if text:
        warnings.warn(f"{setting.former} is now called {setting.variable}", FutureWarning, stacklevel=1)
    return text


def get_settings() -> Settings:
    """Reads the environment.

    Raises:
        SettingError: A variable does not parse; names the variable, the value and what is allowed.
    """
    values: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        text = os.environ.get(setting.variable) or _by_former_name(setting)
        try:
            values[name] = setting.parser(text) if text else setting.default
        except ValueError as error:
            raise SettingError(f"{setting.variable}={text!r}: {error}") from None
    return Settings(**values)


def unknown_variables(names: Iterable[str] | None = None) -> list[str]:
    """``DITRON_*`` variables (of ``names``, else of the environment) that no setting reads: most likely misspelt
    ones."""
    known = {name for setting in SETTINGS.values() for name in (setting.variable, setting.former)}
    names = os.environ if names is None else names
    return sorted(n for n in names if n.startswith("DITRON_") and n not in known and not n.startswith("DITRON_TEST_"))


@contextmanager
def under_policy(mode: str) -> Iterator[None]:
    """``DITRON_POLICY`` is ``mode`` for a while."""
    previous = os.environ.get("DITRON_POLICY")
    os.environ["DITRON_POLICY"] = mode
    try:
        yield
    finally:
        del os.environ["DITRON_POLICY"]
        if previous is not None:
            os.environ["DITRON_POLICY"] = previous
