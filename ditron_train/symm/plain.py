"""Plain values as JSON and back: what ranks tell each other through a store that any process may write to.

None, truth values, numbers, texts, bytes, tuples, lists and dictionaries with texts for keys, in one another. Reading
them runs no code of whoever wrote them, as unpickling would.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from ditron_train.runtime.errors import DitronError

_TUPLE, _BYTES, _DICT = "tuple", "bytes", "dict"


def to_plain(value: object) -> bytes:
    """``value`` in ASCII.

    Raises:
        TypeError: Something in it is none of these.
    """
    return json.dumps(_tagged(value), separators=(",", ":")).encode("ascii")


def from_plain(content: bytes) -> Any:
    """What ``to_plain`` was given, of the same types.

    Raises:
        DitronError: ``content`` is something else.
    """
    try:
        return _untagged(json.loads(content))
    except (ValueError, TypeError, AttributeError, RecursionError):
        raise DitronError("what another rank was to say is unreadable: something else writes to this job") from None


def _tagged(value: Any) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_tagged(part) for part in value]
    if kind is tuple:
        return {_TUPLE: [_tagged(part) for part in value]}
    if kind is bytes:
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    if kind is dict and all(type(name) is str for name in value):
        return {_DICT: {name: _tagged(part) for name, part in value.items()}}
    raise TypeError(f"not plain: {kind.__name__}")


def _untagged(value: Any) -> Any:
    if isinstance(value, list):
        return [_untagged(part) for part in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag == _TUPLE and isinstance(content, list):
        return tuple(_untagged(part) for part in content)
    if tag == _BYTES:
        return base64.b64decode(content, validate=True)
    if tag == _DICT:
        return {name: _untagged(part) for name, part in content.items()}
    raise ValueError(tag)
