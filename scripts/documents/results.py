"""Writes the parts of documents that are made from results (gains, training steps) and, whole, the page with the means
and tables of all results. ``python scripts/readme.py`` calls this.

A part stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ditron_train.tools.results import FP8_PREFIX, TRAINING, TRAINING_STEP, Row, Stamp, measurement_files, read_results
from ditron_train.tools.tables import cells_of

PICTURES = Path("benchmarks") / "pictures"
RESULTS_PAGE = Path("benchmarks") / "README.md"

_TP = (("ag_gemm", "forward"), ("gemm_rs", "forward"), ("transformer_layer", "forward_backward"))
_HEADLINES: dict[str, tuple[tuple[str, str], ...]] = {
    "tp": (*_TP, ("gemm_ar", "forward")),
    "tp fp8_tensorwise": _TP,
    "tp fp8_blockwise": _TP,
    "sp": (("gemm_a2a", "forward"), ("a2a_gemm", "forward"), ("attention_layer", "forward_backward")),
    "ep": (
        ("dispatch", "forward"),
        ("combine", "forward"),
        ("moe_layer", "forward_backward"),
        ("gathered_experts", "forward_backward"),
    ),
    "pp": (("gemm_and_transfer", "forward"), ("pipeline_step", "forward_backward")),
    "muon": (("newton_schulz", "forward"), ("muon_step", "forward")),
}
"""What the table of gains shows of each benchmark, in bf16 or in a recipe: op and pass."""


def picture_path(result: Path) -> Path:
    """Where the picture of a results file is, relative to the root:
    ``benchmarks/pictures/<device>x<count>-<bench>.png``."""
    return PICTURES / f"{result.parent.name}-{result.stem}.png"


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
    """The parts that are made from the repository's ``benchmarks/results``: ``gains``, ``steps``, and ``trained``,
    those steps whose rows tell all."""
    return {
        "gains": lambda: _gains(root),
        "steps": lambda: _steps(root),
        "trained": lambda: _steps(root, only_telling=True),
    }


def _gains(root: Path) -> str:
    """One line a parallelism; of an op that several machines measured, the rows of the most GPUs. Those of ``verify``
    were timed shortly and do not count."""
    measured = (read_results(path) for path in measurement_files(root) if path.stem != "verify")
    results = sorted(measured, key=lambda result: result[0].count)
    lines = [
        "| `--ditron` | speedup over stock Megatron (min-max across shapes) | bits | measured on |",
        "| --- | --- | --- | --- |",
    ]
    for bench, headlines in _HEADLINES.items():
        feature, _, recipe = bench.partition(" ")
        name = f"`{feature}`" + (f" in FP8, {recipe.removeprefix(FP8_PREFIX)}" if recipe else "")
        shown, machines, equal = [], [], True
        for op, direction in headlines:
            title = f"{op} {recipe}".strip()
            found = [
                (stamp, [row for row in rows if (row.title, row.direction) == (title, direction)])
                for stamp, rows in results
            ]
            found = [(stamp, rows) for stamp, rows in found if rows]
            if not found:
                continue
            stamp, rows = found[-1]
            span = _span([row.speedup for row in rows])
            shown.append(f"{_op_words(op, direction)} {span}")
            machines.append(_machine(stamp))
            equal = equal and all(row.bitwise_equal for row in rows)
        if shown:
            bits = "equal" if equal else "**DIFFER**"
            lines.append(f"| {name} | {', '.join(shown)} | {bits} | {', '.join(dict.fromkeys(machines))} |")
    return "\n".join(lines) if len(lines) > 2 else "No results of a GPU machine are committed yet."


def _steps(root: Path, only_telling: bool = False) -> str:
    """Every training that ``compare`` ran, by feature and number of GPUs; ``only_telling``: of each the newest whose
    row has its command, plan, versions and trace."""
    results = (read_results(path) for path in measurement_files(root) if path.stem == TRAINING)
    steps = [(stamp, row) for stamp, rows in results for row in rows if row.tells_all or not only_telling]
    if only_telling:
        newest_last = sorted(steps, key=lambda step: (step[1].stamp or {}).get("date", step[0].date))
        steps = list({(row.op, row.model, row.fp8, stamp.count): (stamp, row) for stamp, row in newest_last}.values())
    what = "with its command, plan and trace" if only_telling else "of a GPU machine"
    missing = f"No training step {what} is committed yet."
    return (_job_table(steps) if only_telling else _step_table(steps)) if steps else missing


def _by_feature(steps: Sequence[tuple[Stamp, Row]]) -> list[tuple[str, Stamp, Row]]:
    order = list(_HEADLINES)
    named = [(row.op.removeprefix(TRAINING_STEP), stamp, row) for stamp, row in steps]
    return sorted(named, key=lambda step: (order.index(step[0].split(",")[0]), step[0], step[1].count, step[2].model))


def _step_model(row: Row) -> str:
    return row.model if row.fp8 is None else f"{row.model} in FP8 ({row.fp8})"


def _job_table(steps: Sequence[tuple[Stamp, Row]]) -> str:
    """A line a job, with a column for each number of GPUs."""
    counts = sorted({stamp.count for stamp, _ in steps})
    jobs: dict[tuple[str, str], dict[int, str]] = {}
    for features, stamp, row in _by_feature(steps):
        words = (
            f"{row.speedup:.3f}x of {row.native_us / 1e3:.0f} ms ({stamp.device.removeprefix('NVIDIA ').split()[0]})"
        )
        words += "" if row.bitwise_equal else f", {row.bits_words}"
        jobs.setdefault((features, _step_model(row)), {})[stamp.count] = words
    lines = [
        f"| `--ditron` | trained | {' | '.join(f'{count} GPUs' for count in counts)} |",
        f"| --- | --- |{' --- |' * len(counts)}",
    ]
    for (features, model), found in jobs.items():
        lines.append(f"| `{features}` | {model} | {' | '.join(found.get(count, '') for count in counts)} |")
    return "\n".join(lines)


def _step_table(steps: Sequence[tuple[Stamp, Row]]) -> str:
    lines = [
        "| `--ditron` | trained | on | Megatron | fused | speed | peak memory | symmetric | bits |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for features, stamp, row in _by_feature(steps):
        times = f"{row.native_us / 1e3:.0f} ms | {row.ditron_us / 1e3:.0f} ms | {row.speedup:.3f}x"
        trained = f"{_step_model(row)}: {model_words(row)}"
        memory = _memory_words(row)
        lines.append(f"| `{features}` | {trained} | {_machine(stamp)} | {times} | {memory} | {row.bits_words} |")
    return "\n".join(lines)


def _memory_words(row: Row) -> str:
    """Two cells: peak reserved memory natively and fused, and symmetric memory; a dash for rows without them."""
    words = "{native:.1f}, {ditron:.1f} GiB | {ditron_symmetric:.2f} GiB" if row.memory_gib else "- | -"
    return words.format(**row.memory_gib or {})


def _machine(stamp: Stamp) -> str:
    """How many of which GPU, without its maker and memory."""
    return f"{stamp.count} x {stamp.device.removeprefix('NVIDIA ').split()[0]}"


def _op_words(op: str, direction: str) -> str:
    return f"`{op}`" if direction == "forward" else f"`{op}` with backward"


def render_results(root: Path) -> str:
    """The page with every committed result: conditions, means, tables and pictures."""
    sections = [_section(path, root) for path in measurement_files(root)]
    how = "How it is measured: [measurements](../docs/measurements/index.md)."
    intro = f"# Results\n\nMade by `python scripts/readme.py` from `results/`. {how}"
    return "\n\n".join([intro, *sections]) + "\n"


def _title(path: Path, stamp: Stamp) -> str:
    command = {"verify": "verify", TRAINING: "compare", "lengths": "tests.lengths"}.get(
        path.stem, f"bench {path.stem}"
    )
    return f"{stamp.count} x {stamp.device}: `{command}`"


def _section(path: Path, root: Path) -> str:
    stamp, rows = read_results(path)
    lines = [f"## {_title(path, stamp)}", "", _conditions(stamp), ""]
    if "summary" in stamp.settings:
        lines += [stamp.settings["summary"] + ".", ""]
    if path.stem == TRAINING:
        own = [
            f"`{row.op.removeprefix(TRAINING_STEP)}` {row.model}: commit {_own_words(stamp, row)}."
            for row in rows
            if row.commit or row.stamp
        ]
        return "\n".join(
            [*lines, *(line for words in own for line in (words, "")), _step_table([(stamp, row) for row in rows])]
        )
    older: dict[str, list[str]] = {}
    for row in rows:
        if row.commit or row.stamp:
            older.setdefault(_own_words(stamp, row), []).append(row.title)
    if older:
        words = "; ".join(f"{own}: {', '.join(dict.fromkeys(titles))}" for own, titles in older.items())
        lines += [f"What stands above holds of the newest rows. Rows of other commits: {words}.", ""]
    lines += [_summary(rows), "", markdown_table(rows)]
    picture = picture_path(path.relative_to(root))
    if (root / picture).exists():
        lines += ["", f"![speed over native]({picture.relative_to(RESULTS_PAGE.parent).as_posix()})"]
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


def _span(speedups: Sequence[float]) -> str:
    """From the least to the greatest."""
    ends = [f"{speedup:.2f}x" for speedup in (min(speedups), max(speedups))]
    return " to ".join(dict.fromkeys(ends))


def _summary(rows: Sequence[Row]) -> str:
    """Geometric mean and worst case of each op and pass, and whether all bits were equal."""
    lines = []
    for op, direction in dict.fromkeys((row.title, row.direction) for row in rows):
        chosen = [row for row in rows if (row.title, row.direction) == (op, direction)]
        speedups = [row.speedup for row in chosen]
        mean = math.exp(sum(map(math.log, speedups)) / len(speedups))
        bits = "bits equal" if all(row.bitwise_equal for row in chosen) else "**BITS DIFFER**"
        text = f"- `{op}` {direction.replace('_', ' + ')}: {mean:.2f}x native"
        if len(chosen) > 1:
            text += f" (geometric mean of {len(chosen)} shapes, {_span(speedups)})"
        peers = [row.peer_speedup for row in chosen if row.peer_speedup]
        if peers:
            text += f", {math.exp(sum(map(math.log, peers)) / len(peers)):.2f}x {chosen[0].peer}"
        lines.append(f"{text}, {bits}")
    return "\n".join(lines)


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


def markdown_table(rows: Sequence[Row]) -> str:
    """Returns the rows as a Markdown table."""
    header, lines = cells_of(rows)
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *lines])
