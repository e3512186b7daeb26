"""Writes the parts of documents that are made from results (gains, training steps, means) and, whole, the pages of
results: a list of all files, and of each machine a page with its rows. ``python scripts/readme.py`` calls this.

A part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median

from ditron_train.tools.results import (
    FP8_PREFIX,
    RESULTS,
    TRAINING,
    TRAINING_STEP,
    Row,
    Stamp,
    measurement_files,
    read_results,
)
from ditron_train.tools.tables import cells_of
from documents.tables import table

PICTURES = Path("benchmarks") / "pictures"
RESULTS_PAGE = Path("benchmarks") / "README.md"
#: Results of what have a page in docs/measurements.
KINDS = ("tp", "sp", "ep", "pp", "muon", "fp8")
#: A job's steps are not shown in README if two native runs of it differ by more than this share.
_LARGEST_SPREAD = 0.1
_MADE = "Made by `python scripts/readme.py` from the JSON files in `benchmarks/results`."
_HOW = "[Measurements](../docs/measurements/index.md) says how it is measured, and has the means of each op."
_PAGES = {"gemm": "tp"}
_PASSES = {"forward": "", "forward_backward": " with backward"}

_TP = (("ag_gemm", "forward"), ("gemm_rs", "forward"), ("transformer_layer", "forward_backward"))
_HEADLINES: dict[str, tuple[tuple[str, str], ...]] = {
    "tp": (*_TP, ("gemm_ar", "forward")),
    "tp fp8_tensorwise": _TP,
    "tp fp8_blockwise": _TP,
    "sp": (("gemm_a2a", "forward"), ("a2a_gemm", "forward"), ("attention_layer", "forward_backward")),
    "ep": (
        *((op, "forward") for op in ("dispatch", "group_gemm", "combine")),
        ("moe_layer", "forward_backward"),
        ("gathered_experts", "forward_backward"),
    ),
    "pp": (("send_recv", "forward"), ("gemm_and_transfer", "forward"), ("pipeline_step", "forward_backward")),
    "muon": (("newton_schulz", "forward"), ("muon_step", "forward")),
    "loss": (("cross_entropy", "forward_backward"),),
    "det": (("embedding", "forward_backward"),),
}
"""What the table of gains shows of each benchmark, in bf16 or in a recipe: op and pass."""


def picture_path(result: Path) -> Path:
    """Where the picture of a results file is, relative to the root:
    ``benchmarks/pictures/<device>x<count>-<bench>.svg``."""
    return PICTURES / f"{result.parent.name}-{result.stem}.svg"


def render(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """Returns the document ``text`` with each of its generated ``parts`` made anew.

    Args:
        text: The document as it is.
        parts: Name of each part that it has to have, and what makes the part.

    Raises:
        ValueError: A part's marks are missing or stand twice, or a results file cannot be read.
    """
    for name, make in parts.items():
        pattern = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"the document needs one part between <!-- begin {name} --> and <!-- end {name} -->")
        (begin, end), made = pattern.findall(text)[0], make()
        text = pattern.sub(lambda _, part=f"{begin}{made}\n{end}": part, text)
    return text


def result_parts(root: Path) -> dict[str, Callable[[], str]]:
    """The parts that are made from the repository's ``benchmarks/results``.

    ``typical`` and ``gains`` are README's: training steps that can be measured again, and ops. ``steps``
    is every training step; the others, named by `KINDS`, are the means of every op of a page in docs/measurements.
    """
    return {
        "typical": lambda: _typical(_shown_steps(root)),
        "gains": lambda: _gains(root),
        "steps": lambda: _step_table(_steps(root)),
        **{kind: lambda kind=kind: _means(root, kind) for kind in KINDS},
    }


@dataclass(frozen=True)
class _Op:
    """The rows of one op and pass in one file of results."""

    path: Path
    stamp: Stamp
    rows: Sequence[Row]

    @property
    def key(self) -> tuple[str, str]:
        return self.rows[0].title, self.rows[0].direction

    @property
    def bits(self) -> str:
        return "equal" if all(row.bitwise_equal for row in self.rows) else "**DIFFER**"


def _ops(root: Path) -> list[_Op]:
    """Every op of every file but those of training steps and of ``verify``, whose calls are few; most GPUs last."""
    found = []
    for path in measurement_files(root):
        stamp, rows = read_results(path)
        for key in dict.fromkeys((row.title, row.direction) for row in rows if path.stem not in ("verify", TRAINING)):
            found.append(_Op(path, stamp, [row for row in rows if (row.title, row.direction) == key]))
    return sorted(found, key=lambda op: op.stamp.count)


def _gains(root: Path) -> str:
    """One line a parallelism; of an op that several machines measured, the rows of the most GPUs."""
    rows, newest = [], {op.key: op for op in _ops(root)}
    for bench, headlines in _HEADLINES.items():
        feature, _, recipe = bench.partition(" ")
        keys = [(f"{name} {recipe}".strip(), direction) for name, direction in headlines]
        ops = [newest[key] for key in keys if key in newest]
        name = f"`{feature}`" + (f" in FP8, {recipe.removeprefix(FP8_PREFIX)}" if recipe else "")
        speeds = ", ".join(f"`{op.rows[0].op}`{_PASSES[op.key[1]]} {_span(op.rows)}" for op in ops)
        machines = dict.fromkeys(_machine(op.stamp) for op in ops)
        if ops:
            bits = " and ".join(dict.fromkeys(op.bits for op in ops))
            rows.append((name, speeds, bits, ", ".join(machines)))
    return table(("`--ditron`", "speedup over stock Megatron (min-max across shapes)", "bits", "measured on"), rows)


def _means(root: Path, kind: str) -> str:
    """Geometric mean and range of each op of a kind, on each machine, for a page in docs/measurements."""
    rows, names = [], ("op", "on", "shapes", "over native: geometric mean (range)", "over a peer", "bits")
    ops = [op for op in _ops(root) if kind == ("fp8" if op.rows[0].fp8 else _PAGES.get(op.path.stem, op.path.stem))]
    for op in sorted(ops, key=lambda op: (op.key[0], op.key[1] != "forward")):
        peers = [row.peer_speedup for row in op.rows if row.peer_speedup]
        peer = f"{geometric_mean(peers):.2f}x {op.rows[0].peer}" if peers else ""
        where = f"[{_machine(op.stamp)}](../../benchmarks/{_device_page(op.path)}#bench-{op.path.stem})"
        mean = f"{geometric_mean([row.speedup for row in op.rows]):.2f}x"
        speed = f"{mean} ({_span(op.rows)})" if len(op.rows) > 1 else mean
        name = f"`{op.key[0]}` {op.key[1].replace('_', ' + ')}"
        rows.append((name, where, str(len(op.rows)), speed, peer, op.bits))
    return table(names, rows)


def _steps(root: Path) -> list[tuple[Stamp, Row]]:
    """Every training that ``compare`` ran."""
    results = (read_results(path) for path in measurement_files(root) if path.stem == TRAINING)
    return [(stamp, row) for stamp, rows in results for row in rows]


def _shown_steps(root: Path) -> list[tuple[Stamp, Row]]:
    """Those on several GPUs whose row has its command, plan, versions and trace; no job whose own native runs are far
    apart."""
    steps = [(stamp, row) for stamp, row in _steps(root) if row.tells_all and stamp.count > 1]
    runs = [(row.model, (row.jobs_ms or {}).get("native", [1.0])) for _, row in steps]
    unsteady = {model for model, times in runs if max(times) > (1 + _LARGEST_SPREAD) * min(times)}
    return [step for step in steps if step[1].model not in unsteady]


def _typical(steps: Sequence[tuple[Stamp, Row]]) -> str:
    if not steps:
        return "No training step of a GPU machine is committed yet."
    gains = [row.speedup for _, row in steps]
    machines = sorted({_machine(stamp) for stamp, _ in steps})
    middle = f"**Median of {len(gains)} measured training steps: {median(gains):.2f}x**"
    return f"{middle} ({min(gains):.3f}x to {max(gains):.3f}x), on {', '.join(machines)}, one machine each."


def _step_model(row: Row) -> str:
    return row.model if row.fp8 is None else f"{row.model} in FP8 ({row.fp8})"


def step_speedups(root: Path) -> list[tuple[str, float]]:
    """What README's picture shows, the greatest first: job and machine, marked, and speedup of each training step."""
    steps = sorted(_shown_steps(root), key=lambda step: -step[1].speedup)
    marks = [_runs_mark(row)[-1:] + ("" if row.bitwise_equal else " (bits differ)") for _, row in steps]
    return [(f"{_step_model(row)}, {_machine(at)}{mark}", row.speedup) for mark, (at, row) in zip(marks, steps)]


def _runs_mark(row: Row) -> str:
    """``*`` if each path ran once, ``~`` if the times of both paths' runs overlap."""
    times = row.jobs_ms
    if times is None or len(times["native"]) < 2:
        return "\\*"
    return "" if max(times["ditron"]) < min(times["native"]) else "\\~"


def _step_table(steps: Sequence[tuple[Stamp, Row]]) -> str:
    rows, order = [], list(_HEADLINES)
    named = [(row.op.removeprefix(TRAINING_STEP), at.count, row.model, at, row) for at, row in steps]
    for features, _, _, stamp, row in sorted(named, key=lambda step: (order.index(step[0].split(",")[0]), *step[:3])):
        trained = f"{_step_model(row)}: {model_words(row)}"
        times = [f"{time_us / 1e3:.0f} ms" for time_us in (row.native_us, row.ditron_us)]
        speedup = f"{row.speedup:.3f}x{_runs_mark(row)}"
        rows.append((f"`{features}`", trained, _machine(stamp), *times, speedup, row.bits_words))
    return table(("`--ditron`", "trained", "on", "native", "fused", "speedup", "bits"), rows)


def _machine(stamp: Stamp) -> str:
    """How many of which GPU, without its maker and memory."""
    return f"{stamp.count} x {stamp.device.removeprefix('NVIDIA ').split()[0]}"


def _device_page(path: Path) -> str:
    """The page of a file of results, relative to the folder of benchmarks."""
    return f"{RESULTS.name}/{path.parent.name}/README.md"


def result_pages(root: Path) -> dict[Path, str]:
    """By their paths relative to ``root``: the list of all committed results, and of each machine a page with its
    rows, conditions and pictures."""
    files = [(path, *read_results(path)) for path in measurement_files(root)]
    index: list[tuple[str, ...]] = []
    pages: dict[str, list[str]] = {}
    for path, stamp, rows in files:
        title, page = _title(path), _device_page(path)
        link = f"[`{title}`]({page}#{title.replace(' ', '-').replace('.', '')})"
        machine = f"{stamp.count} x {stamp.device}"
        index.append((machine, link, stamp.date, f"`{stamp.commit[:13]}`", str(len(rows))))
        sections = pages.setdefault(page, [f"# {machine}\n\n{_MADE}"])
        sections.append(f"## `{title}`\n\n{_section(path, stamp, rows, root)}")
    texts = {RESULTS_PAGE.parent / page: "\n\n".join(parts) + "\n" for page, parts in pages.items()}
    listed = table(("machine", "file", "date", "commit", "rows"), index)
    marked = f"<!-- begin files -->\n{listed}\n<!-- end files -->"
    return {RESULTS_PAGE: f"# Results\n\n{_MADE} {_HOW}\n\n{marked}\n", **texts}


def _title(path: Path) -> str:
    return {"verify": "verify", TRAINING: "compare", "lengths": "tests.lengths"}.get(path.stem, f"bench {path.stem}")


def _section(path: Path, stamp: Stamp, rows: Sequence[Row], root: Path) -> str:
    lines = [_conditions(stamp), ""]
    if "summary" in stamp.settings:
        lines += [stamp.settings["summary"] + ".", ""]
    older: dict[str, list[str]] = {}
    for row in rows:
        if row.commit or row.stamp:
            name = f"`{row.op.removeprefix(TRAINING_STEP)}` {row.model}" if path.stem == TRAINING else row.title
            older.setdefault(_own_words(stamp, row), []).append(name)
    if older:
        words = "; ".join(f"{own}: {', '.join(dict.fromkeys(names))}" for own, names in older.items())
        lines += [f"These are the conditions of the newest rows. Rows of other commits: {words}.", ""]
    lines += [_step_table([(stamp, row) for row in rows]) if path.stem == TRAINING else table(*cells_of(rows))]
    picture = picture_path(path.relative_to(root))
    if (root / picture).exists():
        lines += ["", f"![speed over native](../../{picture.relative_to(RESULTS_PAGE.parent).as_posix()})"]
    return "\n".join(lines)


_VERSIONS = {
    "driver": "driver",
    "torch": "torch",
    "triton": "triton",
    "nccl": "NCCL",
    "megatron_core": "megatron-core",
    "transformer_engine": "Transformer Engine",
}


def _conditions(stamp: Stamp) -> str:
    versions = {words: getattr(stamp, name) for name, words in _VERSIONS.items()}
    listed = ", ".join(f"{words} {version}" for words, version in versions.items() if version)
    return f"{stamp.date}, commit `{stamp.commit}`, {listed}."


def _own_words(stamp: Stamp, row: Row) -> str:
    """The commit of a row that was measured under another stamp, and what else of that differs, if the row says."""
    own = row.stamp or {}
    words = [own["date"]] if "date" in own else []
    words += [f"{_VERSIONS.get(name, name)} {own[name]}" for name in own if name not in ("date", "settings")]
    words += [
        f"without `{name}`" if value is None else f"`{name}={value}`"
        for name, value in own.get("settings", {}).items()
    ]
    return f"`{row.commit or stamp.commit}`" + (f" ({', '.join(words)})" if words else "")


def _span(rows: Sequence[Row]) -> str:
    """From the least speedup to the greatest."""
    speedups = [row.speedup for row in rows]
    ends = [f"{speedup:.2f}x" for speedup in (min(speedups), max(speedups))]
    return " to ".join(dict.fromkeys(ends))


_DIVIDED = {"TP": "tensor_model", "CP": "context", "EP": "expert_model", "PP": "pipeline_model"}


def model_words(row: Row) -> str:
    """The sizes of a training step in words: the model, how it is divided, what a step takes; what is not known is
    left out."""

    def words(text: str, *names: str) -> list[str]:
        sizes = [row.shape.get(name) for name in names]
        return [] if None in sizes else [text.format(*sizes)]

    experts = words("{} experts of {}", "num_experts", "moe_ffn_hidden_size")
    experts += words("top-{}", "moe_router_topk") if experts else words("FFN {}", "ffn_hidden_size")
    model = [*words("{} layers", "num_layers"), *words("hidden {}", "hidden_size"), *experts]
    ranks = {short: row.shape.get(f"{name}_parallel_size", 1) for short, name in _DIVIDED.items()}
    divided = [f"{short} {number}" for short, number in ranks.items() if number > 1]
    batch = words("{} sequences of {} tokens a step", "global_batch_size", "seq_length") + words(
        "{} at a time", "micro_batch_size"
    )
    return "; ".join(", ".join(group) for group in (model, divided, batch) if group)
