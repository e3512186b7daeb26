"""Writes the generated parts of the README: measured results, environment variables, supported versions.

A part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. ``python scripts/readme.py`` calls this.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ditron_train.bench.rows import RESULTS, Row, Stamp, read_results
from ditron_train.bench.tables import markdown_table
from ditron_train.runtime.settings import SETTINGS
from ditron_train.runtime.versions import SUPPORTED

__all__ = ["PICTURES", "picture_path", "render", "roofline_path"]

PICTURES = Path("benchmarks") / "pictures"


def picture_path(result: Path) -> Path:
    """Where the picture of a results file lies, relative to the root: ``benchmarks/pictures/<device>x<count>-<bench>.png``."""
    return PICTURES / f"{result.parent.name}-{result.stem}.png"


def roofline_path(result: Path) -> Path:
    """Likewise for the roofline of results that have one."""
    return PICTURES / f"{result.parent.name}-{result.stem}-roofline.png"


def render(text: str, root: Path) -> str:
    """Returns the README's ``text`` with every generated part made anew.

    Args:
        text: The README as it is.
        root: The repository, whose ``benchmarks/results`` are shown.

    Raises:
        ValueError: A part's marks are missing, or a results file cannot be read.
    """
    parts: dict[str, Callable[[], str]] = {
        "results": lambda: _results(root),
        "settings": _settings,
        "versions": _versions,
    }
    for name, make in parts.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"the README needs one part between <!-- begin {name} --> and <!-- end {name} -->")
        text = pattern.sub(lambda match, made=make(): f"{match.group(1)}{made}\n{match.group(2)}", text)
    return text


def _settings() -> str:
    lines = ["| variable | value | default | what it does |", "| --- | --- | --- | --- |"]
    for setting in SETTINGS:
        default = "unset" if setting.default is None else f"`{setting.default}`"
        lines.append(f"| `{setting.variable}` | {setting.type_name} | {default} | {setting.help} |")
    return "\n".join(lines)


def _versions() -> str:
    lines = ["| library | supported | needed | why |", "| --- | --- | --- | --- |"]
    for entry in SUPPORTED:
        needed = "always" if entry.required else "optional"
        lines.append(f"| {entry.name} | `{entry.specifier}` | {needed} | {entry.why} |")
    return "\n".join(lines)


def _results(root: Path) -> str:
    files = sorted((root / RESULTS).glob("*/*.json"))
    sections = [_section(path, root) for path in files]
    return "\n\n".join(sections) if sections else "No results of a GPU machine are committed yet."


def _section(path: Path, root: Path) -> str:
    stamp, rows = read_results(path)
    command = path.stem if path.stem == "verify" else f"bench {path.stem}"
    lines = [f"### {stamp.count} x {stamp.device}: `{command}`", "", _conditions(stamp), ""]
    if "summary" in stamp.settings:
        lines += [stamp.settings["summary"] + ".", ""]
    lines += [_summary(rows), "", markdown_table(rows)]
    picture = picture_path(path.relative_to(root))
    if (root / picture).exists():
        lines += ["", f"![speed over native]({picture.as_posix()})"]
    roofline = roofline_path(path.relative_to(root))
    if (root / roofline).exists():
        lines += ["", f"![roofline]({roofline.as_posix()})"]
    return "\n".join(lines)


def _conditions(stamp: Stamp) -> str:
    versions = {
        "driver": stamp.driver,
        "torch": stamp.torch,
        "triton": stamp.triton,
        "NCCL": stamp.nccl,
        "megatron-core": stamp.megatron_core,
        "Transformer Engine": stamp.transformer_engine,
    }
    listed = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return f"{stamp.date}, commit `{stamp.commit}`, {listed}."


def _summary(rows: Sequence[Row]) -> str:
    """Geometric mean and worst case of each op and pass, and whether all bits were equal."""
    lines = []
    for op, direction in dict.fromkeys((row.op, row.direction) for row in rows):
        chosen = [row for row in rows if (row.op, row.direction) == (op, direction)]
        speedups = [row.speedup for row in chosen]
        mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
        bits = "bits equal" if all(row.bitwise_equal for row in chosen) else "**BITS DIFFER**"
        text = f"- `{op}` {direction.replace('_', ' + ')}: {mean:.2f}x native"
        if len(chosen) > 1:
            text += f" (geometric mean of {len(chosen)} shapes, {min(speedups):.2f}x to {max(speedups):.2f}x)"
        peers = [row.peer_speedup for row in chosen if row.peer_speedup]
        if peers:
            text += f", {math.exp(sum(map(math.log, peers)) / len(peers)):.2f}x {chosen[0].peer}"
        lines.append(f"{text}, {bits}")
    return "\n".join(lines)
