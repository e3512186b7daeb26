"""What ships as data, and what reads it: shapes of benchmarks, profiles of devices, tuning tables."""

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
    content: dict[str, Any] = json.loads(resources.files(__name__).joinpath("workloads.json").read_text("utf-8"))
    return content
