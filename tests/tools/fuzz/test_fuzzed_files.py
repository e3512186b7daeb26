"""Whatever stands in a file that we read: it is read, or refused in one sentence.

CI draws 35 changes of each format. ``FUZZ_EXAMPLES=1200 pytest tests/tools/fuzz --hypothesis-profile=search``
draws 10,000 others in all.
"""

from __future__ import annotations

import copy
import json
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ditron_train.data.device_profiles import network_named, profile_named
from ditron_train.data.tuning_table import parse_table
from ditron_train.policy.plan import fingerprint, load_plan
from ditron_train.runtime.errors import DitronError
from ditron_train.runtime.flight_recorder import CAPACITY, HEADER_BYTES, MAGIC, SLOT
from ditron_train.symm.plain import from_plain, to_plain
from ditron_train.tools import job as megatron_job
from ditron_train.tools.compare.steps import differences, read_job
from ditron_train.tools.postmortem.diverge import find_divergence
from ditron_train.tools.postmortem.files import read_folder
from ditron_train.tools.predict.estimates import Cluster
from ditron_train.tools.predict.predictor import predict
from ditron_train.tools.results import read_results
from ditron_train.tools.trace.timeline import read_chrome_trace
from tests.faults.campaign import read_rows

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "35"))
ROOT = Path(__file__).parents[3]

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20), st.just("9" * 400)
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _places(child, (*path, key))


@st.composite
def changed(draw: Callable[..., Any], good: Any) -> Any:
    """A good document with some of its parts replaced, left out, or put in twice."""
    document = copy.deepcopy(good)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(list(_places(document))))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(VALUES)
            continue
        holder = document
        for key in path[:-1]:
            holder = holder[key]
        if draw(st.booleans()) and isinstance(holder, dict):
            del holder[path[-1]]
        else:
            holder[path[-1]] = draw(VALUES)
    return document


@st.composite
def damaged(draw: Callable[..., Any], content: bytes) -> bytes:
    """The bytes of a document, cut or with some of them replaced."""
    words = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(words)))
        words[place : place + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
    return bytes(words[: draw(st.integers(0, len(words)))] if draw(st.booleans()) else words)


def _documents(good: Any) -> st.SearchStrategy[bytes]:
    text = json.dumps(good).encode()
    return st.one_of(changed(good).map(lambda one: json.dumps(one).encode()), damaged(text), st.binary(max_size=64))


def _answers(read: Callable[[], Any]) -> None:
    """It raises an error of this package, in one sentence."""
    try:
        read()
    except (DitronError, ValueError) as error:
        text = str(error)
        assert text and "Traceback" not in text and len(text) < 4000


def _plan() -> dict[str, Any]:
    keys = (
        "tp column 8x8 8x8 float32 on 2 ranks (bits)",
        "tp column 8x8 8x8 bfloat16 with bias on 2 ranks (strict)",
        "tp column fp8 8x8 8x8 gradients e5m2, frozen, bias on 2 ranks, ring (strict; batch invariant)",
    )
    entry = {"use_ditron": True, "reason": "equal", "bits_equal": True, "native_us": 3.0, "ditron_us": 2.0}
    return {"format": "ditron_train plan 3", "made_with": fingerprint(), "decisions": dict.fromkeys(keys, entry)}


def _read_plan(path: Path) -> None:
    plan = load_plan(path)
    assert isinstance(plan.path, Path)


def _small(path: str, rows: str) -> Any:
    content = json.loads((ROOT / path).read_text())
    content[rows] = content[rows][:2]
    return content


def _table() -> Any:
    content = json.loads((ROOT / "ditron_train/data/tuning/nvidia-h200.json").read_text())
    for ops in content["choices"].values():
        for op in ops:
            ops[op] = dict(list(ops[op].items())[:1])
    return content


TRACE = {"traceEvents": [
    {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1.0, "dur": 2.0, "pid": 0, "tid": 7,
     "args": {"stream": 7, "correlation": 3, "grid": [8, 1, 1]}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.5, "dur": 0.1, "pid": 1, "tid": 1,
     "args": {"correlation": 3}},
    {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0.5, "dur": 0.1, "pid": 1, "tid": 1, "args": {}},
]}  # fmt: skip
FAULTS = {"faults": [{"seed": 1, "job": "tp", "kind": "late", "place": "x", "ended": "raised", "after_s": 1.0}]}
READERS: dict[str, tuple[Callable[[], Any], Callable[[Path], Any]]] = {
    "plan": (_plan, _read_plan),
    "tuning table": (_table, lambda path: parse_table(path.read_text(errors="replace"), "table")),
    "results": (lambda: _small("benchmarks/results/H200x1/muon.json", "rows"), read_results),
    "trace": (lambda: TRACE, read_chrome_trace),
    "faults": (lambda: FAULTS, read_rows),
}


@pytest.mark.parametrize("name", READERS)
def test_a_good_one_is_read(name: str, tmp_path: Path) -> None:
    make, read = READERS[name]
    (tmp_path / "file").write_text(json.dumps(make()))
    read(tmp_path / "file")


@pytest.mark.parametrize("name", READERS)
def test_any_file_is_read_or_refused(name: str) -> None:
    make, read = READERS[name]

    @settings(max_examples=EXAMPLES)
    @given(_documents(make()))
    def check(content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "file")
            path.write_bytes(content)
            _answers(lambda: read(path))

    check()


def _job_words(draw: Callable[..., Any]) -> list[str]:
    """A job's arguments, some of them with other numbers behind them, or left out."""
    path = draw(st.sampled_from(sorted((ROOT / "benchmarks/jobs").glob("*-*.txt"))))
    common = (ROOT / "benchmarks/jobs/common.txt").read_text()
    words = shlex.split(common + path.read_text(), comments=True)
    sizes = st.integers(0, 9).map(lambda power: 1 << power) | st.sampled_from([0, 3, 65536, 1 << 20, 10**400])
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from([word for word in words if word.startswith("--")]) | st.text(max_size=9))
        words += [name, str(draw(sizes))] if draw(st.booleans()) else [name]
    if draw(st.booleans()):
        del words[draw(st.integers(0, len(words) - 1))]
    return words


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_any_job_is_estimated_or_refused(data: st.DataObject) -> None:
    words = _job_words(data.draw)
    cluster = Cluster(profile_named("h200"), 1, data.draw(st.sampled_from([1, 2, 4, 8])), network_named("ib-400"))

    def estimate() -> None:
        found = predict(megatron_job.read_job(words, allow_unknown=True), cluster, ("tp", "sp", "ep", "pp", "muon"))
        assert 0 < found.step_ms < float("inf") and 1 <= found.gain < float("inf")

    _answers(estimate)


HEADER = {
    "rank": 0, "world_size": 2, "host": "here", "pid": 1, "started_s": 1.0, "state": "raised",
    "groups": [["0", [0, 1]], ["1", ["range", 0, 2, 1]]],
    "error": {"kind": "PeerTimeoutError", "text": "", "time_ns": 1, "group": "0", "missing_rank": 1, "waited_s": 5.0},
}  # fmt: skip
SLOTS = SLOT.pack(1, 1, 1, 0, 1, b"op") + SLOT.pack(2, 1, 1, 1, 1, b"op")


@settings(max_examples=EXAMPLES)
@given(_documents(HEADER), damaged(SLOTS))
def test_any_records_are_read_or_refused(header: bytes, slots: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        size = CAPACITY * SLOT.size
        content = (MAGIC + header + b"\n").ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES] + slots.ljust(size, b"\0")[:size]
        Path(folder, "rank0.records").write_bytes(content)
        _answers(lambda: find_divergence(read_folder(Path(folder))))


NOTES = [
    {"world_size": 1, "features": [], "dtype": "bfloat16", "sizes": {}},
    {"step": 1, "losses": {"lm loss": "0x1p0"}, "grad_norm": "0x1p0", "seconds": 1.0, "plan": []},
]


@settings(max_examples=EXAMPLES)
@given(changed(NOTES), st.data())
def test_any_notes_of_a_job_are_read_or_refused(notes: Any, data: st.DataObject) -> None:
    lines = notes if isinstance(notes, list) else [notes]
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    if data.draw(st.booleans()):
        content = data.draw(damaged(content or b" "))

    def read(folder: str) -> None:
        job = read_job(Path(folder))
        differences(job, job)

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "rank0.jsonl").write_bytes(content)
        _answers(lambda: read(folder))


@settings(max_examples=EXAMPLES)
@given(st.one_of(damaged(to_plain((1, "a", b"b", [None, True], {"c": 1.5}))), st.binary(max_size=64)))
def test_anything_in_the_store_is_read_or_refused(content: bytes) -> None:
    _answers(lambda: from_plain(content))
