"""Words that the documentation, the code and its messages no longer use: one term for one thing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("ditron_train", "scripts", "tests", "docs", "examples")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
#: Retired words, as regular expressions of whole words: identifiers and phrases; and what is said instead.
RETIRED = {
    r"(?i)ours(?!_)": "fused, the fused path, this package",
    r"\"ditron\"(?= (ms|us))": "fused",
    r"(?i)Megatron's path": "native, stock Megatron",
    r"(?i)nothing cover(s|ed)": "exposed",
    r"(?i)late[ _]host|hosts? (is|was|are) late|LateHost": "CPU-bound",
    r"rows[ _]at[ _]once|_?AtOnce": "grouped quantization",
    r"\w*why_(not|no|hidden|native|otherwise|all)\w*": "unsupported_reason",
    r"\w*revealing\w*|reveals": "order-probe inputs",
    r"(?i)(?<!left )fold(s|ed|ing)?|\w+_fold|fold_\w+": "ring-order reduction",
    r"\w*give_up\w*|stay_away": "abort, abort_next_exchange",
    r"_?[Mm]eetings?": "rendezvous",
    r"(?i)granules?": "flag block",
    r"_?PADS|pad_ptr": "signal buffer",
    r"_?Fan|\w*_fans?": "strided copy",
    r"\w*in_turn": "flags_each_rank, in_sequence, interleaved",
    r"beside_wgrad": "overlap_wgrad",
    r"own_wgrad\w*": "triton_wgrad",
    r"(?i)\w*fewest_\w+|few_rows": "min_rows",
    r"(?i)lies|lying": "is stored, is, overlaps with",
    r"(?i)lends?|lending|lent|\w*loans?": "lease, leased receive buffer",
    r"(?i)posed": "simulated",
    r"(?i)halve_tail": "split_last_wave",
    r"Place(?=[(\],])|import Place": "RunEnvironment",
    r"is_told(?!_)|held_bytes": "log_decision, peak_bytes",
    r"(every|each|other|of the|of a) rooms?(?! for)": "subpackage",
    r"Floors?": "layer",
    r"with_names|InPlaceOf": "rebind_globals, EqualsBaseClass",
    r"reckoned|mended": "estimated, fixed",
    r"See (above|`OpSpec`)": "say it, or leave it out",
}
#: Where a retired word stays: old names that are still read, folders of committed results, names of others.
ALLOWED = (
    '"--posed", dest="simulated"',
    'former="DITRON_PP_LOANS"',
    "/posed/nodes.json",
    "DITRON_PP_LOANS",
    "ditron_train.megatron.meeting",
    '("ep beside_wgrad ", "ep overlap_wgrad ")',
    '" ranks, fold-"',
    "`the host is late`",
    '"ep beside_wgrad 8 tokens',
    '"reduce_rows", "fold_rows"',
    'else "fold_rows"  # as until',
    '"the host is late at" in line or',
    '"of it the host is late", "of it CPU',
    '"--room", dest="package"',
    "drop_and_pad",
    "fused_pad",
    "moe_pad",
)


def files() -> list[str]:
    """Files that are looked at; rules about the house itself may name what they forbid."""
    listed = subprocess.run(
        ["git", "ls-files", *FOLDERS, *PAGES], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name for name in listed.stdout.split("\n") if name.endswith((".py", ".md", ".sh", ".slurm", ".c"))]
    return [name for name in names if not name.startswith("tests/house/") and (ROOT / name).exists()]


def retired_words(text: str) -> list[str]:
    """Each retired word in ``text``, and what to say instead."""
    for allowed in ALLOWED:
        text = text.replace(allowed, "")
    flat = re.sub(r"\s*\n\s*(#:? )?", " ", text)
    found = []
    for pattern, instead in RETIRED.items():
        for match in re.finditer(rf"(?<![\w/-])(?:{pattern.removeprefix('(?i)')})(?![\w-])", flat, _flags(pattern)):
            found.append(f"...{flat[max(0, match.start() - 30) : match.end() + 30]}...: {instead}")
    return found


def _flags(pattern: str) -> int:
    return re.IGNORECASE if pattern.startswith("(?i)") else 0


@pytest.mark.parametrize("name", files())
def test_retired_words(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    if name == "CHANGELOG.md":
        text = text.split("\n## 0.", 1)[0]
        text = "\n".join(
            line for line in text.split("\n") if not line.startswith("|")
        )  # former names, and what they are now
    assert retired_words(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "by ours", '"ours"', "OURS = 1", "in Megatron's\n  # path", "the host is late", "a posed node",
        "def why_not(self): ...", "self._why_not_layer(x)", "it lies there", "num_loans", "See above.",
        "FOLD_BLOCK = 1", "that nothing\n# covers",
    ],
)  # fmt: skip
def test_the_check_sees_a_retired_word(text: str) -> None:
    assert retired_words(text)


@pytest.mark.parametrize(
    "text",
    ["of course", "exposed, supposed", "a folder, manifold", "multiplies", "relies", "ours_passed", "padding",
     "reload", "--posed", "there is room for it", "ten meetups", "unfold"],
)  # fmt: skip
def test_the_check_lets_ordinary_english_through(text: str) -> None:
    assert retired_words(text) == []
