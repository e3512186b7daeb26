"""How large the package may be: lines, methods of a class, files in a folder, lines of a file and of a function; and
its documents: words.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import re
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "ditron_train"


@dataclasses.dataclass(frozen=True)
class Budget:
    """One limit.

    Attributes:
        limit: The most there may be. It is lowered whenever the count falls, and never raised for convenience.
        slack: By how much the count may be below the limit before the limit has to be lowered.
        goal: What the limit is to become.
        advice: What to do when the count is above the limit.
    """

    limit: int
    slack: int
    goal: int
    advice: str


BUDGETS = {
    "logical lines of ditron_train/, scripts/ and benchmarks/*.py": Budget(
        34667,
        250,
        31000,
        "Delete what nobody uses, share what is written twice, or turn tables into data. Blank lines, comments, "
        "docstrings and imports do not count, so do not make code denser.",
    ),
    "methods of the largest class": Budget(
        15, 0, 15, "Split the class by what it decides, or turn methods into functions of a module."
    ),
    "files in one folder": Budget(
        15, 0, 15, "Merge small files that belong to one idea: an op is one file with its kernels, plan and autograd."
    ),
    "lines of the longest file": Budget(800, 800, 800, "Split the file by idea; an op may take 300 to 800 lines."),
    "lines of the longest function": Budget(60, 0, 60, "Name the steps of the function as functions."),
    "words of README, docs, benchmarks/README and CHANGELOG": Budget(
        30000,
        500,
        30000,
        "Leave out histories, say things once and link to them, or generate tables. Generated parts and code blocks "
        "do not count.",
    ),
}
#: The most words of single documents, counted alike.
WORDS_OF_PAGES = {"CHANGELOG.md": 2000, "docs/reference/limits.md": 1500, "docs/guides/predict.md": 400}
#: The results are listed, not told: words of everything that is on their first page.
WORDS_OF_RESULTS = 5000

_NOT_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def logical_lines(source: str) -> int:
    """Lines that hold code, without blank lines, comments, docstrings and imports."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            skipped.update(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                skipped.update(range(first.lineno, first.end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - skipped)


def methods(source: str) -> dict[str, int]:
    """How many methods each class has, without those that it inherits."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return {node.name: sum(isinstance(item, _FUNCTIONS) for item in node.body) for node in classes}


def function_lines(source: str) -> dict[str, int]:
    """How many lines of code each function has from ``def`` to its end, the longest one of a name."""
    lines, counts = source.splitlines(keepends=True), {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _FUNCTIONS):
            own = logical_lines(textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])))
            counts[node.name] = max(own, counts.get(node.name, 0))
    return counts


def words(text: str) -> int:
    """How many words of a document are written by hand: without generated parts and code blocks."""
    text = re.sub(r"<!-- begin ([\w-]+) -->.*?<!-- end \1 -->", "", text, flags=re.DOTALL)
    return len(re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE).split())


def _words_of_documents() -> tuple[int, str]:
    """Words of all documents together, and which has the most."""
    pages = [ROOT / name for name in ("README.md", "CHANGELOG.md", "benchmarks/README.md")]
    counts = {page: words(page.read_text(encoding="utf-8")) for page in [*pages, *(ROOT / "docs").rglob("*.md")]}
    longest = max(counts, key=counts.__getitem__)
    return sum(counts.values()), f"most of them, {counts[longest]}, in {longest.relative_to(ROOT).as_posix()}"


def _sources(files: Iterable[Path]) -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(files)}


@cache
def measured() -> dict[str, tuple[int, str]]:
    """What each budget counts now, and where its largest part is."""
    package = _sources(PACKAGE.rglob("*.py"))
    outside = _sources([*(ROOT / "scripts").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")])
    folders = Counter(str(Path(file).parent) for file in package)
    of_files = {file: source.count("\n") for file, source in package.items()}
    of_classes = {f"{name} of {file}": n for file, source in package.items() for name, n in methods(source).items()}
    of_functions = {
        f"{name} of {file}": n for file, source in package.items() for name, n in function_lines(source).items()
    }
    largest = [
        max((count, name) for name, count in counts.items())
        for counts in (of_classes, folders, of_files, of_functions)
    ]
    lines = sum(logical_lines(source) for source in (package | outside).values())
    return dict(zip(BUDGETS, [(lines, "all files together"), *largest, _words_of_documents()], strict=True))


def complaint(what: str, budget: Budget, count: int, where: str) -> str | None:
    """What is to be done about a count, or nothing."""
    if count > budget.limit:
        return f"{what}: {count} ({where}), at most {budget.limit} are allowed. {budget.advice}"
    if count < budget.limit - budget.slack:
        return f"{what}: only {count} ({where}) are left of {budget.limit}. Lower the limit in {__file__} to {count}."
    return None


@pytest.mark.parametrize("what", BUDGETS)
def test_within_its_budget(what: str) -> None:
    problem = complaint(what, BUDGETS[what], *measured()[what])
    assert problem is None, problem


@pytest.mark.parametrize("page", WORDS_OF_PAGES)
def test_pages_are_short(page: str) -> None:
    assert words((ROOT / page).read_text(encoding="utf-8")) <= WORDS_OF_PAGES[page]


def test_the_page_of_results_is_a_list() -> None:
    assert len((ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8").split()) <= WORDS_OF_RESULTS


def test_generated_parts_and_code_blocks_have_no_words() -> None:
    made = "<!-- begin a-table -->\n| x | y |\n<!-- end a-table -->"
    assert words(f"# Two words\n\n{made}\n\n```bash\nls -l\n```\n\nfour more words here `a b`\n") == 9
    assert words("<!-- begin one -->\nx\n<!-- end another -->") == 9


def test_a_count_above_its_limit_and_one_far_below_it_are_seen() -> None:
    budget = Budget(limit=100, slack=5, goal=50, advice="Merge files.")
    assert complaint("files", budget, 100, "a") is None
    assert complaint("files", budget, 95, "a") is None
    assert "Merge files." in str(complaint("files", budget, 101, "a"))
    assert "to 94" in str(complaint("files", budget, 94, "a"))


def test_lines_that_are_no_code_do_not_count() -> None:
    source = '"""Words\nof a module."""\n\nimport os\nfrom a import (\n    b,\n)\n\n# Why.\nX = """one\ntwo"""\n'
    assert logical_lines(source) == 2
    assert logical_lines("def f(\n    x,\n):\n    '''Words.'''\n    # Why.\n    return x  # because\n") == 4
    assert logical_lines("class C:\n    '''Words.'''\n    x = 1\n\n    def f(self): ...\n") == 3


def test_methods_and_lines_of_functions_are_counted() -> None:
    source = (
        "class C:\n    x = 1\n    def f(self): ...\n    async def g(self):\n        def h(): ...\n        return h\n"
    )
    assert methods(source) == {"C": 2}
    assert function_lines(source) == {"f": 1, "g": 3, "h": 1}
