"""How far `predict` is from what was measured: every committed step of a training job, measured and estimated."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ditron_train.data.device_profiles import network_named, profile_named
from ditron_train.megatron.plugin.arguments import WITH_OTHERS
from ditron_train.tools.fp8.recipes import fp8_format
from ditron_train.tools.job import read_job
from ditron_train.tools.predict.estimates import Cluster
from ditron_train.tools.predict.predictor import Prediction, predict
from ditron_train.tools.results import TRAINING_STEP, Row, measurement_files, read_results
from documents.tables import table

_PROFILES = {"H200": "h200", "H100-80GB-HBM3": "h100"}
#: What rows without a command do not say of the models that they name: heads, and groups of them.
_HEADS = {4096: (32, 8), 8192: (64, 8), 7168: (56, 56)}
_OLD = (
    "--swiglu --sequence-parallel --bf16 --deterministic-mode --cp-comm-type a2a --position-embedding-type rope "
    "--moe-token-dispatcher-type alltoall --moe-grouped-gemm --disable-bias-linear --attention-dropout 0 "
    "--group-query-attention --vocab-size 128"
)


@dataclass(frozen=True)
class Checked:
    """A committed step: the folder of its file, its row, and what ``predict`` says of it without ``--step-ms``."""

    folder: str
    row: Row
    rough: Prediction
    stated: Prediction

    @property
    def gain_error(self) -> float:
        """Measured gain less the gain that is estimated with the measured native step stated."""
        return self.row.native_us / self.row.ditron_us - self.stated.gain

    @property
    def rough_error(self) -> float:
        """Of the rough step: above 0 it is too long."""
        return self.rough.step_ms * 1e3 / self.row.native_us - 1


def _words(row: Row) -> list[str]:
    """The row's command, or what its shape says."""
    if row.command is None:
        heads, groups = _HEADS[row.shape["hidden_size"]]
        sizes = {**row.shape, "num_attention_heads": heads, "num_query_groups": groups}
        words = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
        return [*words, *_OLD.split(), "--optimizer", "dist_muon" if "muon" in row.op else "adam"]
    words = shlex.split(row.command)
    return words if row.fp8 is None else [*words, "--fp8-recipe", row.fp8, "--fp8-format", fp8_format(row.fp8)]


def check_steps(root: Path) -> list[Checked]:
    """Every committed step on H200s and H100s with a feature that overlaps something, of a kind that is estimated."""
    found = []
    for path in measurement_files(root):
        device = path.parent.name.rpartition("x")[0]
        for row in read_results(path)[1] if device in _PROFILES else ():
            features = row.op.removeprefix(TRAINING_STEP).split(",")
            is_step = row.op.startswith(TRAINING_STEP) and not set(features) <= set(WITH_OTHERS)
            if is_step and "flex" not in (words := _words(row)):  # of that dispatcher no gain is estimated
                job = read_job(words, allow_unknown=True)
                cluster = Cluster(profile_named(_PROFILES[device]), 1, row.world_size, network_named("ib-400"))
                predictions = (predict(job, cluster, features, ms) for ms in (None, row.native_us / 1e3))
                found.append(Checked(path.parent.name, row, *predictions))
    return found


def middle(values: Iterable[float], share: float = 0.9) -> tuple[float, float]:
    """Between what the middle ``share`` of the values is."""
    ordered = sorted(values)
    left_out = round((1 - share) / 2 * len(ordered))
    return ordered[left_out], ordered[len(ordered) - 1 - left_out]


def document_part(root: Path) -> str:
    """The table of docs/measurements/predict.md."""
    rows = []
    for one in check_steps(root):
        row, native_ms = one.row, one.row.native_us / 1e3
        model = row.model if row.fp8 is None else f"{row.model}, FP8 {row.fp8}"
        rough = f"{native_ms:.0f} ms, {one.rough.step_ms:.0f} ms ({100 * one.rough_error:+.0f} %)"
        gains = f"{row.native_us / row.ditron_us:.3f}x, {one.stated.gain:.3f}x"
        rows.append((f"`{row.op.removeprefix(TRAINING_STEP)}`", model, one.folder, rough, gains))
    return table(("step", "trained", "on", "native: measured, rough model", "gain: measured, estimated"), rows)
