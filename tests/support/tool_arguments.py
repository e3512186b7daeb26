"""Arguments of a tool as its command line has them: its own, and Megatron's after ``--``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """As ``ditron COMMAND words`` would."""
    words = list(words)
    place = words.index("--") if "--" in words else len(words)
    parsed = parser.parse_args(words[:place])
    parsed.job = words[place + 1 :]
    return parsed
