"""The format of results: what is written is what is read, and unknown things stay out."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from ditron_train.megatron.plugin.arguments import FEATURES
from ditron_train.tools.results import (
    MEGATRON_TESTS,
    RESULTS,
    TRAINING,
    Row,
    Stamp,
    read_results,
    result_path,
    write_beside,
    write_results,
)
from ditron_train.tools.stamp import collect_stamp
from ditron_train.tools.tables import cells_of, show_rows
from documents.drawings import draw_speedups, draw_steps, draw_timeline, timelines
from documents.results import (
    RESULTS_PAGE,
    model_words,
    picture_path,
    render,
    result_pages,
    result_parts,
    step_speedups,
)
from documents.tables import table

ROOT = Path(__file__).parents[3]
FULL = Row(
    op="ag_gemm",
    direction="forward",
    model="LLaMA3-7B",
    world_size=8,
    dtype="bfloat16",
    shape={"m": 8192, "n": 11008, "k": 4096},
    native_us=340.0,
    ditron_us=200.0,
    bitwise_equal=True,
    comm_sms=8,
    gemm_us=133.0,
    comm_us=170.0,
    limit_us=160.0,
    peer="async-TP",
    peer_us=500.0,
    wire_gbps=300.0,
    logical_gbps=310.0,
    spread=0.01,
)
SHORT = Row(
    op="newton_schulz",
    direction="forward",
    model="square",
    world_size=8,
    dtype="bfloat16",
    shape={"rows": 4096, "columns": 4096},
    native_us=600.0,
    ditron_us=800.0,
    bitwise_equal=False,
    comm_sms=0,
)


def machine_page(root: Path) -> str:
    """The page of the only machine that has results."""
    (page,) = [text for path, text in result_pages(root).items() if path != RESULTS_PAGE]
    return page


def stamp(**changes: object) -> Stamp:
    return dataclasses.replace(collect_stamp(torch.device("cpu"), 8, repetitions=3), **changes)


def test_fields_are_those_of_the_architecture() -> None:
    assert list(FULL.to_json()) == [
        "op",
        "pass",
        "model",
        "world_size",
        "dtype",
        "m",
        "n",
        "k",
        "native_us",
        "ditron_us",
        "speedup",
        "bitwise_equal",
        "comm_sms",
        "gemm_us",
        "comm_us",
        "limit_us",
        "fraction_of_limit",
        "peer",
        "peer_us",
        "peer_speedup",
        "wire_gbps",
        "logical_gbps",
        "spread",
    ]
    assert FULL.to_json()["speedup"] == 1.7
    assert FULL.to_json()["fraction_of_limit"] == 0.8
    assert FULL.to_json()["peer_speedup"] == 2.5


def test_round_trip(tmp_path: Path) -> None:
    path = write_results(tmp_path, "tp", stamp(device="NVIDIA H200"), [FULL, SHORT])
    assert path == tmp_path / "H200x8" / "tp.json"
    assert read_results(path) == (stamp(device="NVIDIA H200"), [FULL, SHORT])
    assert "peer" not in json.loads(path.read_text())["rows"][1]


@pytest.mark.parametrize(
    "text", ["", "[]", '{"rows": []}', '{"stamp": {"device": 1}, "rows": []}', '{"stamp": {}, "rows": [{}]}']
)
def test_foreign_files_are_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "foreign.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="foreign.json"):
        read_results(path)


def test_paths_hold_no_odd_characters() -> None:
    assert (
        result_path(Path(), stamp(device="NVIDIA H100 80GB HBM3", count=2), "pp").as_posix()
        == "H100-80GB-HBM3x2/pp.json"
    )


def test_stamp_tells_what_it_ran_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("AWS_SECRET", "no")
    collected = collect_stamp(torch.device("cpu"), 2, repetitions=7)
    assert collected.torch == torch.__version__ and collected.count == 2 and collected.driver is None
    assert collected.settings["NCCL_ALGO"] == "Ring" and collected.settings["repetitions"] == "7"
    assert "AWS_SECRET" not in collected.settings


def test_only_rows_that_are_measured_again_are_replaced(tmp_path: Path) -> None:
    others = [
        dataclasses.replace(FULL, **change)
        for change in (
            {"op": "gemm_rs"},
            {"direction": "backward"},
            {"model": "LLaMA3-70B"},
            {"dtype": "float16"},
            {"dtype": "fp8_tensorwise"},
            {"world_size": 4},
            {"shape": {**FULL.shape, "m": 4096}},
        )
    ]
    write_beside(tmp_path, "tp", stamp(), [FULL, *others])
    again = dataclasses.replace(FULL, ditron_us=100.0)
    _, rows = read_results(write_beside(tmp_path, "tp", stamp(), [again]))
    key = lambda row: str(row.key)  # noqa: E731
    assert sorted(rows, key=key) == sorted([again, *others], key=key)
    assert [row.fp8 for row in rows] == [None] * 7 + ["tensorwise"]


def _stays(folder: Path, own: Stamp, *later: Stamp) -> Row:
    """A row that was measured under ``own``, as it stands when others were measured beside it later."""
    write_beside(folder, "tp", own, [SHORT])
    for one in later:
        path = write_beside(folder, "tp", one, [FULL])
    (row,) = [row for row in read_results(path)[1] if row.op == SHORT.op]
    return row


def test_a_row_that_stays_says_what_it_was_measured_under(tmp_path: Path) -> None:
    own = stamp(commit="a", date="2026-01-01", torch="2.9", settings={"repetitions": "3", "NCCL_ALGO": "Ring"})
    middle = stamp(commit="b", date="2026-02-01", torch="2.9", settings={"repetitions": "9", "summary": "of one run"})
    new = dataclasses.replace(middle, torch="2.11", settings={"repetitions": "3", "DITRON_X": "1"})
    row = _stays(tmp_path, own, middle)
    differing = {"date": "2026-01-01", "settings": {"NCCL_ALGO": "Ring", "repetitions": "3"}}
    assert row == dataclasses.replace(SHORT, commit="a", stamp=differing)
    row = _stays(tmp_path, own, middle, new, new)
    differing = {"torch": "2.9", "date": "2026-01-01", "settings": {"DITRON_X": None, "NCCL_ALGO": "Ring"}}
    assert row == dataclasses.replace(SHORT, commit="a", stamp=differing)
    assert _stays(tmp_path, own, middle, new, own) == SHORT, "the same stamp again"
    assert _stays(tmp_path, own, dataclasses.replace(own, commit="c")) == dataclasses.replace(
        SHORT, commit="a", stamp={}
    )
    old = dataclasses.replace(SHORT, commit="before")  # of an older file
    write_results(tmp_path, "tp", own, [old])
    assert old in read_results(write_beside(tmp_path, "tp", new, [FULL]))[1], "nothing is claimed of it"


def test_the_page_says_what_older_rows_were_measured_under(tmp_path: Path) -> None:
    now = stamp(device="NVIDIA H200", commit="new", date="2026-02-01")
    settings = {"NCCL_ALGO": "Ring", "DITRON_X": None}
    older = dataclasses.replace(
        SHORT, commit="abc", stamp={"nccl": "2.27", "date": "2026-01-01", "settings": settings}
    )
    steps = [dataclasses.replace(older, op="training_step tp"), dataclasses.replace(older, op="training_step ep")]
    steps[1] = dataclasses.replace(steps[1], commit=None, stamp={"date": "2026-01-02"})
    write_results(tmp_path / RESULTS, "tp", now, [FULL, older])
    write_results(tmp_path / RESULTS, "training", now, steps)
    page = machine_page(tmp_path)
    own = "`abc` (2026-01-01, NCCL 2.27, `NCCL_ALGO=Ring`, without `DITRON_X`)"
    assert f"Rows of other commits: {own}: {older.title}." in page
    assert f"{own}: `tp` square; `new` (2026-01-02): `ep` square." in page


def test_tables() -> None:
    lines = table(*cells_of([FULL, SHORT])).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert "1.70x" in lines[2] and "80 %" in lines[2] and "DIFFER" in lines[3]
    console = Console(record=True, width=240)
    show_rows([SHORT], stamp(), console)
    shown = console.export_text()
    assert "0.75x" in shown and "peer" not in shown


def test_pictures() -> None:
    root = ElementTree.fromstring(draw_speedups(stamp(), [FULL, SHORT]))
    words = [node.text for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"fused", f"{FULL.speedup:.2f}x", f"{SHORT.speedup:.2f}x", FULL.model} <= set(words)
    assert "0.990x" in draw_steps([("a", 0.99), ("b", 1.1)])


def test_every_op_has_one_timeline_of_both_paths_and_its_page_shows_it() -> None:
    pages = {page.stem: page.read_text(encoding="utf-8") for page in (ROOT / "docs/design/ops").glob("*.md")}
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "ditron_train").rglob("*.py")]
    drawn = timelines(ROOT)
    assert set(drawn) == set(pages)
    for op, lanes in drawn.items():
        assert f"benchmarks/pictures/timeline-{op}.svg)" in pages[op]
        assert "".join([*pages.values(), *sources]).count(f"Timeline of ``{op}``") == 1
        assert {path for path, _, _ in lanes} == {"native", "fused"}


def test_a_span_that_waits_begins_where_its_wait_is() -> None:
    for op, lanes in timelines(ROOT).items():
        for (_, _, above), (_, lane, spans) in zip(lanes, lanes[1:]):
            if lane == "waits":
                begins = {match.start() for match in re.finditer(r"\| ?[^| ]", above)}
                waits = {match.start() for match in re.finditer(r"\| ?\^", spans)}
                assert waits and waits <= begins, op


def test_words_of_a_timeline_are_inside_of_their_boxes_and_every_color_is_in_the_legend() -> None:
    for op, lanes in timelines(ROOT).items():
        root = ElementTree.fromstring(draw_timeline(op, lanes))
        parts = [part for part in root if part.tag.endswith(("rect", "text"))][1:]
        legend, drawn = parts[:6:2], parts[7:]
        boxes = [(box, text) for box, text in zip(drawn, drawn[1:]) if box.tag.endswith("rect")]
        assert len(boxes) == sum(len(re.findall(r"[^| ][^|]*", spans)) for _, _, spans in lanes)
        for box, text in boxes:
            if box.get("fill") != "none":
                assert 6.5 * len(text.text or "") <= float(box.get("width", 0)), (op, text.text)
                assert box.get("fill") in {entry.get("fill") for entry in legend}


def test_readme_names_every_feature() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [name for name in FEATURES if f"| `{name}` |" not in text] == []


def test_every_result_file_reads_and_has_equal_bits() -> None:
    for path in (ROOT / RESULTS).glob("*/*.json"):
        if path.stem == MEGATRON_TESTS:
            tables = json.loads(path.read_text(encoding="utf-8"))["rows"]
            assert tables and all(not row["lost"] and row["ours_ran"] for row in tables), path
            continue
        _, rows = read_results(path)
        different = [row for row in rows if not row.bitwise_equal]
        assert rows and all(path.stem == TRAINING and row.native_repeats is False for row in different), path
        assert path.stem == TRAINING or (ROOT / picture_path(path.relative_to(ROOT))).exists(), (
            "python scripts/readme.py"
        )


def test_sizes_of_a_training_in_words() -> None:
    sizes = dict(
        num_layers=2, hidden_size=64, ffn_hidden_size=96, num_experts=8, moe_ffn_hidden_size=32, moe_router_topk=2
    )
    batch = dict(
        global_batch_size=32,
        micro_batch_size=2,
        seq_length=4096,
        expert_model_parallel_size=4,
        pipeline_model_parallel_size=1,
    )
    row = dataclasses.replace(SHORT, shape={**sizes, **batch})
    logged = "2 layers, hidden 64, 8 experts of 32, top-2; EP 4; 32 sequences of 4096 tokens a step, 2 at a time"
    assert model_words(row) == logged
    assert model_words(dataclasses.replace(SHORT, shape={"ffn_hidden_size": 96, "moe_router_topk": 2})) == "FFN 96"


def test_readme_shows_steps_that_can_be_measured_again(tmp_path: Path) -> None:
    known = dataclasses.replace(
        SHORT, op="training_step tp", model="known", command="torchrun x.py", plan=["tp column: fused, faster"],
        versions={"torch": "2"}, trace={"nothing runs": [1.5, None]}, jobs_ms={"native": [1.0]},
    )  # fmt: skip
    rows = [known, dataclasses.replace(known, model="unknown", plan=None)]
    path = write_results(tmp_path / RESULTS, "training", stamp(device="NVIDIA H200"), rows)
    assert read_results(path)[1] == rows
    steps = result_parts(tmp_path)["steps"]()
    assert len(step_speedups(tmp_path)) == 1 and "unknown" in steps


def test_documents_show_results(tmp_path: Path) -> None:
    write_results(tmp_path / RESULTS, "tp", stamp(device="NVIDIA H200"), [FULL, SHORT])
    parts = result_parts(tmp_path)
    marks = "".join(f"<!-- begin {name} -->\nold\n<!-- end {name} -->\n" for name in parts)
    text = render(f"intro\n{marks}outro", parts)
    assert text.startswith("intro") and text.endswith("outro") and "\nold\n" not in text
    page, index = machine_page(tmp_path), result_pages(tmp_path)[RESULTS_PAGE]
    assert "# 8 x NVIDIA H200" in page and "(results/H200x8/README.md#bench-tp)" in index
    assert "| 1.70x | 2.50x async-TP | equal |" in text and "| 0.75x |  | **DIFFER** |" in text
    assert "No training step of a GPU machine" in text
    write_results(tmp_path / RESULTS, "verify", stamp(device="NVIDIA H200"), [SHORT])
    text = render(text, parts)
    assert "| `tp` | `ag_gemm` 1.70x | equal | 8 x H200 |" in text
    assert table(*cells_of([FULL, SHORT])) in page
    assert render(text, parts) == text
    shape = {
        "num_layers": 6,
        "hidden_size": 8192,
        "tensor_model_parallel_size": 2,
        "context_parallel_size": 1,
        "micro_batch_size": 1,
    }
    steps = [
        dataclasses.replace(SHORT, op=f"training_step {features}", model="some", shape=shape)
        for features in ("ep", "tp,pp", "tp")
    ]
    write_results(
        tmp_path / RESULTS,
        "training",
        stamp(device="NVIDIA H200"),
        [steps[0], dataclasses.replace(steps[1], commit="abc"), steps[2]],
    )
    text = render(text, parts)
    lines = [
        line for line in text.splitlines() if "| some: 6 layers, hidden 8192; TP 2; 1 at a time | 8 x H200 |" in line
    ]
    assert [line.split("`")[1] for line in lines] == ["tp", "tp,pp", "ep"]
    assert "Rows of other commits: `abc`: `tp,pp` some." in machine_page(tmp_path)
    older = dataclasses.replace(SHORT, commit="abc")
    write_results(tmp_path / RESULTS, "tp", stamp(device="NVIDIA H200"), [FULL, older])
    assert f"Rows of other commits: `abc`: {older.title}." in machine_page(tmp_path)
    with pytest.raises(ValueError, match="begin typical"):
        render("<!-- begin steps -->\n<!-- end steps -->", parts)


def test_readme_has_the_steps_of_each_machine_but_none_that_native_runs_contradict(tmp_path: Path) -> None:
    told = {"command": "torchrun", "plan": ["tp"], "versions": {"torch": "2.11"}, "trace": {"native": {}}}
    step = dataclasses.replace(SHORT, op="training_step tp", model="some", shape={}, bitwise_equal=True, **told)
    apart = dataclasses.replace(step, native_us=1e6, jobs_ms={"native": [1001.0, 999.0], "ditron": [0.8, 0.8]})
    overlap = dataclasses.replace(apart, op="training_step ep", jobs_ms={"native": [1.0, 0.95], "ditron": [1.0, 0.8]})
    unsteady = dataclasses.replace(apart, model="unsteady", jobs_ms={"native": [1.0, 1.2], "ditron": [0.8, 0.8]})
    untold = dataclasses.replace(step, model="without a trace", trace=None)
    of = {"NVIDIA H100 80GB HBM3": [apart, overlap, unsteady], "NVIDIA H200": [step, untold]}
    for device, rows in of.items():
        write_results(tmp_path / RESULTS, "training", stamp(device=device), rows)
    of_smaller = [dataclasses.replace(overlap, bitwise_equal=False), dataclasses.replace(step, model="unsteady")]
    write_results(
        tmp_path / RESULTS, "training", dataclasses.replace(stamp(device="NVIDIA H200"), count=2), of_smaller
    )
    assert sorted(step_speedups(tmp_path)) == [
        ("some, 2 x H200~ (bits differ)", 1250.0),
        ("some, 8 x H100", 1250.0),
        ("some, 8 x H100~", 1250.0),
        ("some, 8 x H200*", 0.75),
    ]
    assert (
        "Median of 4 measured training steps: 1250.00x** (0.750x to 1250.000x)" in result_parts(tmp_path)["typical"]()
    )
