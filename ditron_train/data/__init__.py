"""The shapes that every benchmark uses, as package data."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

__all__ = ["load_workloads"]


def load_workloads() -> dict[str, Any]:
    """Returns ``workloads.json``: by op, the shapes to measure and the figures published for them.

    Shape fields are global sizes, before they are divided over the ranks; each op's ``about`` says how they are
    divided.
    """
    return json.loads(resources.files(__name__).joinpath("workloads.json").read_text(encoding="utf-8"))
