"""The documents say what is there: links, paths, modules, variables, command lines, code, generated parts."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ditron_train.cli import OF_JOBS, command_parsers
from ditron_train.megatron import add_ditron_args
from ditron_train.optim import Muon
from ditron_train.runtime.errors import NotSupportedError
from ditron_train.runtime.settings import SETTINGS
from ditron_train.tools.job import read_job

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [
    README,
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
#: What the changelog and the measurements tell of is gone.
REMOVED_VARIABLES = {"DITRON_KEEP_GATHERED", "DITRON_MUON_OPT_INS", "DITRON_SP_ORDER"}
TOP_FOLDERS = ("ditron_train", "tests", "scripts", "docs", "examples", "benchmarks", ".ci")
COMMANDS = {"bash", "cd", "export", "mypy", "pip", "python", "ruff", "torchrun"}
#: Of frameworks, whose own command lines nobody checks here.
OTHER_COMMANDS = {"megatron", "ray", "uv"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def prose(text: str) -> str:
    """The text without fenced blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """The headings of a page as a link names them."""
    headings = re.findall(r"^#+ (.+)$", prose(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken_links(path: Path, text: str) -> list[str]:
    """Links of a page, and its pictures, that lead nowhere."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"https?://|mailto:", target):
            continue
        name, _, anchor = target.partition("#")
        page = (path.parent / name).resolve() if name else path
        if not page.exists() or (anchor and page.suffix == ".md" and anchor not in anchors(page)):
            broken.append(target)
    return broken


def is_module_or_member(name: str) -> bool:
    """Whether a dotted name can be imported, or is an attribute of what can."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def missing_names(text: str) -> list[str]:
    """Paths and modules in backticks that are not there."""
    missing = []
    for code in re.findall(r"`([^`]+)`", prose(text)):
        for word in code.split():
            word = word.strip(",;:()'\"")
            if re.search(r"[<>*${}]|\.\.\.", word):
                continue
            if word.split("/")[0] in TOP_FOLDERS and "/" in word:
                if not (ROOT / word).exists():
                    missing.append(word)
            elif re.fullmatch(r"ditron_train(\.\w+)+", word) and not is_module_or_member(word):
                missing.append(word)
            elif re.fullmatch(r"\w+\.(py|sh)", word) and not list(ROOT.glob(f"**/{word}")):
                missing.append(word)
    return missing


#: Files of Megatron-LM that users have, and of the quickstart's own run.
ELSEWHERE = {"pretrain_gpt.py", "pretrain.py", "train.py", "SCRIPT.py", "verl.trainer.main_ppo"}


def unknown_variables(text: str) -> set[str]:
    known = {name for setting in SETTINGS.values() for name in (setting.variable, setting.former)} | REMOVED_VARIABLES
    return set(re.findall(r"\bDITRON_[A-Z_]+[A-Z]\b", text)) - known


def extras() -> set[str]:
    """The extras that ``setup.py`` states."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "extras_require":
            return {key.value for key in node.value.keys}
    raise AssertionError("setup.py states no extras")


def lines_of_shell(block: str) -> list[list[str]]:
    """The commands of a block as words, without comments and variables in front."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        if words:
            found.append(words)
    return found


class _Refused(Exception):
    pass


def parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Parses without leaving the process."""

    def refuse(message: str) -> None:
        raise _Refused(f"{parser.prog}: {message}")

    parser.error = refuse  # type: ignore[assignment]
    return parser.parse_args(words)


def check_command(words: list[str]) -> None:
    """Raises `_Refused` where a command line is not one that its tool takes.

    Words that stand for the reader's own are dropped: ``$YOUR_ARGUMENTS``.
    """
    words = [word for word in words if word != "$YOUR_ARGUMENTS"]
    program, rest = words[0], words[1:]
    if program in OTHER_COMMANDS:
        return
    if program not in COMMANDS:
        raise _Refused(f"unknown program {program}")
    if program == "pip":
        wanted = re.fullmatch(r"\.\[(.+)\]", rest[1])
        if rest[0] != "install" or (wanted and not set(wanted[1].split(",")) <= extras()):
            raise _Refused(f"no such extra: {rest}")
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        options = parse(get_args_parser(), rest)
        run = ["-m"] * options.module + [options.training_script, *options.training_script_args]
        check_python(run)
    elif program == "python":
        check_python(rest)
    elif program == "bash" and not (ROOT / rest[0]).exists():
        raise _Refused(f"no script {rest[0]}")


def check_python(words: list[str]) -> None:
    """What stands behind ``python`` or behind torchrun's options."""
    if words[0] != "-m":
        if words[0] not in ELSEWHERE and not (ROOT / words[0]).exists():
            raise _Refused(f"no script {words[0]}")
        return
    module, rest = words[1], words[2:]
    if module in ELSEWHERE:
        return
    if importlib.util.find_spec(module) is None:
        raise _Refused(f"no module {module}")
    if module == "ditron_train.megatron.run":
        parser = add_ditron_args(argparse.ArgumentParser(allow_abbrev=False))
        parser.add_argument("script")
        _, unknown = parser.parse_known_args(rest)
        if [word for word in unknown if word.startswith("--ditron")]:
            raise _Refused(f"the launcher does not know {unknown}")
    elif module == "ditron_train":
        parsers = command_parsers()
        command = " ".join(rest[:2]) if rest[0] == "bench" else rest[0]
        if command not in parsers:
            raise _Refused(f"no command {command}")
        own = rest[len(command.split()) :]
        if command in OF_JOBS and "--" in own:
            own, job = own[: own.index("--")], own[own.index("--") + 1 :]
            if job and not job[0].endswith(".sh"):
                read_job(job, needs=())
        options = parse(parsers[command], own)
        own = getattr(options, "command", None)
        if own:
            check_command(own)


def texts_of_the_package() -> str:
    """Every text in the code, with dots where a value is put in."""
    texts = []
    for path in sorted((ROOT / "ditron_train").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        str(getattr(part, "value", "")) if isinstance(part, ast.Constant) else "..."
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(texts)


def load(path: Path) -> ModuleType:
    """A module by its file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_is_short() -> None:
    assert README.stat().st_size <= 8_192


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("path", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=relative)
def test_paths_and_modules_exist(path: Path) -> None:
    assert set(missing_names(path.read_text(encoding="utf-8"))) - ELSEWHERE == set()


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_variables_are_settings(path: Path) -> None:
    assert unknown_variables(path.read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_command_lines_are_taken(path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8"), "bash"):
        for words in lines_of_shell(block):
            check_command(words)


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_what_compares_layers_on_gpus_has_nccl_add_in_ring_order(path: Path) -> None:
    """Otherwise row layers run natively where NCCL takes a tree, and a plan made so is refused by a job."""
    compares = re.compile(
        r"-m ditron_train (verify|tune|compare|bench tp)\b|-m ditron_train.megatron.run\b.*--ditron tp"
    )
    for block in blocks(path.read_text(encoding="utf-8"), "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            is_elsewhere = "TRITON_INTERPRET=1" in line or "--notes" in line
            assert is_elsewhere or not compares.search(line) or line.startswith("NCCL_ALGO=Ring "), line


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_python_compiles_and_its_imports_resolve(path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8"), "python"):
        tree = ast.parse(block)
        compile(tree, relative(path), "exec")
        for node in ast.walk(tree):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names:
                if name.split(".")[0] == "megatron":
                    pytest.importorskip("megatron.core")
                assert is_module_or_member(name), name


def test_every_shell_block_says_so() -> None:
    """A block without a language would not be checked."""
    for path in PAGES:
        languages = re.findall(r"^```(\w*)\n.*?^```$", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
        assert set(languages) <= {"bash", "python", "text"}, path


def test_generated_parts_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    wanted = load(ROOT / "scripts" / "readme.py").wanted_documents()
    stale = [relative(path) for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "python scripts/readme.py"


def test_the_table_of_settings_is_complete() -> None:
    text = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(DITRON\w*)` \| ([^|]+) \| ([^|]+) \|", text, re.MULTILINE)
    logged = [(name, values.strip(), default.strip()) for name, values, default in rows]
    assert logged == [
        (setting.variable, setting.type_name, "unset" if setting.default is None else f"`{setting.default}`")
        for setting in SETTINGS.values()
    ]


def test_floors_are_those_that_are_checked() -> None:
    text = (ROOT / "docs" / "design" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+\.\d+) \| `(\w+)` \|", text, re.MULTILINE)
    floors = load(ROOT / "tests" / "house" / "test_floors.py").FLOORS
    assert {room: float(floor) for floor, room in rows} == floors


def test_log_lines_are_those_of_the_code() -> None:
    """What the table of reasons quotes stands in the code, part by part."""
    text, logged = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), texts_of_the_package()
    table = text.split("| the log says |")[1].split("\n\n")[0]
    quoted = [
        code for row in re.findall(r"^\| (.+?) \|", table, re.MULTILINE) for code in re.findall(r"`([^`]+)`", row)
    ]
    parts = [part.strip(" ().") for code in quoted for part in code.split("...")]
    assert len(quoted) > 20 and [part for part in parts if len(part) > 4 and part not in logged] == []


@pytest.mark.parametrize(
    "options",
    [
        dict(num_ns_steps=7),
        dict(coefficient_type="cubic"),
        dict(momentum_beta=1.0),
        dict(weight_decay=-1.0),
        dict(split_qkv=True),
        dict(fp32_matmul_prec="low"),
        dict(tp_mode="distributed"),
    ],
    ids=str,
)
def test_reasons_of_muon_are_in_the_table_of_reasons(options) -> None:
    with pytest.raises(NotSupportedError) as raised:
        Muon([torch.nn.Parameter(torch.zeros(4, 4))], **options)
    text = (ROOT / "docs" / "reference" / "reasons.md").read_text(encoding="utf-8")
    reasons = re.findall(r"^\| (.+?) \|$", text.split("## `muon`")[1], re.MULTILINE)
    patterns = [re.escape(reason).replace(re.escape("..."), ".+") for reason in reasons]
    assert any(re.fullmatch(pattern, str(raised.value)) for pattern in patterns)


def test_every_op_has_a_page_and_every_page_is_linked() -> None:
    """From the README on, link by link, every page can be reached."""
    seen, front = set(), [README]
    while front:
        page = front.pop()
        if page in seen:
            continue
        seen.add(page)
        targets = re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8"))
        front += [(page.parent / target).resolve() for target in targets if not target.startswith("http")]
    assert set(PAGES) <= seen


@pytest.mark.parametrize(
    ("check", "text"),
    [
        (missing_names, "`ditron_train/nowhere.py`"),
        (missing_names, "`ditron_train.tp.nothing`"),
        (missing_names, "see `python -m ditron_train.nowhere`"),
        (missing_names, "`nowhere.py`"),
        (unknown_variables, "`DITRON_NOTHING`"),
        (lambda text: broken_links(README, text), "[a](docs/nowhere.md)"),
        (lambda text: broken_links(README, text), "[a](docs/glossary.md#nowhere)"),
    ],
)
def test_the_checks_see_what_is_wrong(check, text: str) -> None:
    assert check(text)


@pytest.mark.parametrize(
    "line",
    [
        "python -m ditron_train verify --nothing",
        "python -m ditron_train cure",
        "torchrun --nproc-per-node 2 -m ditron_train bench tp --nothing",
        "torchrun --nothing 2 -m ditron_train verify",
        "torchrun --nproc-per-node 2 -m ditron_train.megatron.run pretrain_gpt.py --ditron-nothing 1",
        "python -m ditron_train compare --ditron tp torchrun --nothing pretrain_gpt.py",
        "bash scripts/nowhere.sh",
        "python scripts/nowhere.py",
        "pip install '.[nothing]'",
        "make all",
    ],
)
def test_wrong_command_lines_are_seen(line: str) -> None:
    (words,) = lines_of_shell(line)
    with pytest.raises(_Refused):
        check_command(words)
