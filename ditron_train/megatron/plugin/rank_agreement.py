"""Settings that must be the same on every rank of a job: compared when Megatron makes its groups, before any layer is
called.

Ranks decide by these settings without communication. If they differ, most likely from node to node, one of them
would take part in a collective that another rank does not call, and the job would hang at its first layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ditron_train.data.tuning_table import named_table
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.groups import world_group
from ditron_train.runtime.settings import SETTINGS, get_settings
from ditron_train.runtime.versions import newer_libraries
from ditron_train.symm.exchange import exchange

#: What each rank may have for itself: how long it waits, what memory it gives, where it writes.
_OWN = ("timeout_s", "arena_bytes", "postmortem", "features")  # the last are compared as what is on

_FEATURES = "--ditron (or DITRON)"


def _told(features: Iterable[str]) -> dict[str, str]:
    """Name of each setting, and of everything else that decides: its value on this rank, in words."""
    settings, announced = get_settings(), {_FEATURES: ",".join(sorted(features)) or "none"}
    announced["libraries that are other than what was tried"] = ", ".join(newer_libraries()) or "none"
    for name, setting in SETTINGS.items():
        value = getattr(settings, name)
        if name == "tuning":
            value = named_table()  # by content: a rank decides by its table alone
        elif name == "plan" and value is not None:
            # Copies may be in other places; whoever takes a decision from one asks what the others' say.
            value = "a file"
        if name not in _OWN:
            announced[setting.variable] = "unset" if value is None else str(value)
    return announced


def _ranks_in_words(ranks: list[int]) -> str:
    first, last = ranks[0], ranks[-1]
    if len(ranks) == 1:
        return f"rank {first}"
    return f"ranks {first} to {last}" if len(ranks) == last - first + 1 else f"{len(ranks)} ranks from {first} on"


def check_ranks_agree(features: Iterable[str]) -> None:
    """Compares ``features`` and the settings that decide what ranks do together (collective over WORLD, on the host).

    Raises:
        SettingError: Ranks differ; names the setting and who has which value, the same on every rank.
        PeerTimeoutError: A rank did not arrive within ``DITRON_TIMEOUT_S``: most likely no feature is on there.
    """
    mine = _told(features)
    digest = hashlib.sha256(repr(sorted(mine.items())).encode()).hexdigest()
    if len(set(exchange(world_group(), digest))) == 1:  # hundreds of ranks are not to read what each of them was told
        return
    gathered = exchange(world_group(), mine)
    for name in gathered[0]:
        ranks_of: dict[str, list[int]] = {}
        for rank, announced in enumerate(gathered):
            ranks_of.setdefault(announced[name], []).append(rank)
        if len(ranks_of) > 1:
            listed = ", ".join(f"{value} on {_ranks_in_words(ranks)}" for value, ranks in ranks_of.items())
            raise SettingError(f"ranks differ in {name}: {listed}; set it to one value everywhere")
