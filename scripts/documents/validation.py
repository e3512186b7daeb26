"""How far the model is from what was measured: every committed row of a device, op by op, and what is beyond 15 %."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ditron_train.costs import Estimate
from ditron_train.runtime.profiles import Profile, profile_named
from ditron_train.tools.predict.fit import halves, row_errors
from ditron_train.tools.predict.rows import estimate_of
from ditron_train.tools.results import TRAINING_STEP, Row, measurement_files, read_results

#: Beyond this a row needs a reason; and a whole step, whose errors of parts even out.
FAR, FAR_STEP = 0.15, 0.05
_MUCH = 0.1  # of a step: so long the host is late where that decides


@dataclass(frozen=True)
class Checked:
    """A row beside what the model says of it.

    Attributes:
        folder: Of the file, such as ``H200x4``.
        stem: Its name.
        row: What was measured.
        estimate: What the model says.
        judges: Whether the profile was not fitted to it.
    """

    folder: str
    stem: str
    row: Row
    estimate: Estimate
    judges: bool

    @property
    def errors(self) -> tuple[float, float]:
        """Natively and with ours: above 0 it is estimated too long."""
        return row_errors(self.row, self.estimate)

    @property
    def worst(self) -> float:
        """The larger one, without its sign."""
        return max(map(abs, self.errors))

    @property
    def is_step(self) -> bool:
        """Whether it is a whole step of a job."""
        return self.row.op.startswith(TRAINING_STEP)

    @property
    def is_far(self) -> bool:
        """Whether it needs a reason."""
        return self.worst > (FAR_STEP if self.is_step else FAR)

    @property
    def host_decides(self) -> bool:
        """Whether the row's own trace says that the host was late for more than a tenth of the step, on one side, or
        its plan that layers went back to Megatron's path for it."""
        if any("the host is late at" in line for line in self.row.plan or ()):
            return True
        lates, wholes = (self._traced(words) for words in ("of it the host is late", "the step"))
        return any(late is not None and whole and late > _MUCH * whole for late, whole in zip(lates, wholes))

    def _traced(self, words: str) -> list[float | None]:
        """What the row's trace tells in the line that begins with ``words``, in ms, natively and with ours."""
        return next((values for line, values in (self.row.trace or {}).items() if line.startswith(words)), [])


def check_rows(root: Path, profile: Profile, device: str = "H200") -> list[Checked]:
    """Every committed row of ``device`` that the model knows."""
    found = []
    for path in measurement_files(root):
        if path.parent.name.rpartition("x")[0] == device:
            found += [(path, row) for row in read_results(path)[1]]
    judging = {id(row) for row in halves(row for _, row in found)[1]}
    checked = []
    for path, row in found:
        estimate = estimate_of(row, profile)
        if estimate is not None:
            checked.append(Checked(path.parent.name, path.stem, row, estimate, id(row) in judging))
    return checked


def _is_small_model(row: Row) -> bool:
    return any(name in row.model for name in ("DeepSeek-MoE", "Qwen1.5-MoE"))


Rule = tuple[Callable[[Checked], bool], str]
_RULES: Sequence[Rule] = (
    (
        lambda one: one.is_step and one.host_decides,
        "the host is late for more than a tenth of the step, by its trace, or layers went back to Megatron's path for "
        "it, and no two jobs' hosts are alike",
    ),
    (
        lambda one: one.is_step and one.row.command is None,
        "the row has no command: heads, vocabulary and what else the host did are assumed",
    ),
    (
        lambda one: one.row.shape.get("num_experts", 0) > 0 and _is_small_model(one.row),
        "small: the host's time counts, and differs between rows of one run",
    ),
    (
        lambda one: one.row.op == "dispatch" and one.row.shape["num_experts"] < 16,
        "small: the host's time counts, and differs between rows of one run",
    ),
    (
        lambda one: one.row.op in ("group_gemm", "group_dgrad", "group_wgrad", "moe_layer"),
        "last waves of few large experts, and what memory takes beside them, differ by product; timed after few calls",
    ),
    (
        lambda one: one.row.op in ("dispatch", "combine"),
        "natively 3.4 and 3.8 ms in two runs on 4 GPUs; ours took less on 2 than the host elsewhere (0.8 and 0.9 ms)",
    ),
    (
        lambda one: one.row.op == "pipeline_step",
        "native: the same step took 175.5 and 204.6 ms in two runs on 4 GPUs; ours is within 4 %",
    ),
    (
        lambda one: one.row.op == "newton_schulz" and one.row.shape["m"] <= 2048,
        "small: other tiles by cuBLAS and by ours than in a GEMM of a layer",
    ),
    (
        lambda one: one.row.op == "muon_step",
        "matrices that travel beside products hold them up by more than a reduce-scatter; on 2 GPUs natively, too",
    ),
    (
        lambda one: one.row.op in ("send_recv", "gemm_and_transfer", "gemm_beside_transfer"),
        "NCCL takes other protocols and numbers of channels by size and ranks than one rate and one latency say",
    ),
    (
        lambda one: one.stem == "verify" and one.row.shape.get("seqlen") == 8192,
        "short: native is bound by the host, ours by signals",
    ),
    (
        lambda one: one.row.op in ("a2a_gemm", "qkv_projection", "output_projection", "gemm_a2a"),
        "narrow: with 16 heads links and the GEMM take alike, and how they share the GPU is one number here",
    ),
    (lambda one: one.row.op == "layer_under_strict", "timed with the host's work in it"),
    (lambda one: one.row.op in ("gemm_nt", "gemm_nn"), "the same product took 171 and 196 us in one run"),
)


def reason_of(one: Checked) -> str | None:
    """Why a row is far off, or None where nobody knows."""
    return next((reason for applies, reason in _RULES if applies(one)), None)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _medians(checked: Sequence[Checked]) -> tuple[float, float]:
    return tuple(statistics.median(abs(one.errors[side]) for one in checked) for side in (0, 1))  # type: ignore[return-value]


def table_lines(checked: Sequence[Checked]) -> list[str]:
    """A table by op: rows, median errors of the half that judges and of all, rows beyond 15 %."""
    lines = [
        "| op | rows | median error, half that judges: Megatron, ours | all rows | beyond 15 % |",
        "| --- | --- | --- | --- | --- |",
    ]
    ops = dict.fromkeys(one.row.op.split()[0] for one in checked)
    for op in ops:
        rows = [one for one in checked if one.row.op.split()[0] == op]
        judges = [one for one in rows if one.judges] or rows
        cells = [", ".join(_percent(value) for value in _medians(of)) for of in (judges, rows)]
        far = sum(one.worst > FAR for one in rows)  # steps' own limit: `step_lines`
        lines.append(f"| `{op}` | {len(rows)} | {cells[0]} | {cells[1]} | {far} |")
    return lines


def summary_lines(checked: Sequence[Checked]) -> list[str]:
    """All of it in a few sentences."""
    judges = [one for one in checked if one.judges]
    errors = [abs(error) for one in judges for error in one.errors]
    steps = [one for one in checked if one.is_step]
    of_eight = [one for one in checked if one.row.world_size == 8]
    far = sum(one.is_far and not one.is_step for one in checked)
    far_steps = [one for one in steps if one.is_far]
    near = max(one.worst for one in steps if not one.is_far)
    eight = ", ".join(_percent(value) for value in _medians(of_eight))
    return [
        f"- {len(checked)} rows of {', '.join(sorted({one.folder for one in checked}))}. Median error of the half "
        f"that judges: {_percent(statistics.median(errors))}; {far} rows are beyond 15 % on one side or both.",
        f"- {len(steps)} whole steps: at most {_percent(near)} off, but for {len(far_steps)} that are"
        f" up to {_percent(max(one.worst for one in far_steps))} off for the reasons below.",
        f"- 8 ranks, {len(of_eight)} rows: medians {eight} (Megatron, ours).",
    ]


def step_lines(checked: Iterable[Checked]) -> list[str]:
    """Whole steps, one by one."""
    lines = [
        "| step | trained | on | Megatron: measured, predicted | ours: measured, predicted |",
        "| --- | --- | --- | --- | --- |",
    ]
    for one in checked:
        if not one.is_step:
            continue
        pairs = (one.row.native_us, one.estimate.native_us), (one.row.ditron_us, one.estimate.ditron_us)
        cells = [
            f"{measured / 1e3:.0f} ms, {model / 1e3:.0f} ms ({100 * error:+.1f} %)"
            for (measured, model), error in zip(pairs, one.errors)
        ]
        half = "" if one.judges else ", fitted to"
        model = one.row.model if one.row.fp8 is None else f"{one.row.model}, FP8 {one.row.fp8}"
        feature = one.row.op.removeprefix(TRAINING_STEP)
        lines.append(f"| `{feature}`{half} | {model} | {one.folder} | {' | '.join(cells)} |")
    return lines


def far_lines(checked: Sequence[Checked]) -> list[str]:
    """Every row beyond 15 %, and every step beyond 5 %, by reason."""
    by_reason: dict[str, list[str]] = {}
    for one in checked:
        if one.is_far:
            sizes = "x".join(str(size) for size in one.row.shape.values())
            errors = ", ".join(f"{100 * error:+.0f} %" for error in one.errors)
            what = f"`{one.row.op}` {one.row.direction.replace('_', ' + ')}, {one.row.model} {sizes} ({one.folder})"
            by_reason.setdefault(reason_of(one) or "not explained", []).append(f"  - {what}: {errors}")
    return [line for reason, lines in by_reason.items() for line in (f"- {reason}:", *lines)]


def document_part(root: Path) -> str:
    """What stands in docs/guides/predict.md: the summary, the table, whole steps, and what is far off, with why."""
    checked = check_rows(root, profile_named("h200"))
    parts = (summary_lines(checked), table_lines(checked), step_lines(checked))
    unfitted = [replace(one, judges=True) for one in check_rows(root, profile_named("h100"), "H100-80GB-HBM3")]
    on_h100 = [
        "On H100s, whose profile `bench profile` measured and nothing was fitted to:",
        "",
        *step_lines(unfitted),
    ]
    far = ["Beyond 15 %, whole steps beyond 5 % (error natively, error of ours; above 0 the prediction is too long):"]
    return "\n\n".join("\n".join(lines) for lines in (*parts, on_h100, far, far_lines(checked)))
