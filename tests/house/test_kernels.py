"""No kernel spins without a deadline: every loop that polls memory also watches a clock."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "ditron_train"
CLOCK = re.compile(r"clock|globaltimer")


def is_jit(function: ast.FunctionDef) -> bool:
    return any(ast.unparse(node).split("(")[0].split(".")[-1] == "jit" for node in function.decorator_list)


def reads_shared_memory(node: ast.AST) -> bool:
    """Whether an expression loads memory, or does an atomic that only looks (``atomic_add(p, 0)``, ``atomic_cas``)."""
    for call in ast.walk(node):
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func).split(".")[-1]
        if name in ("load", "atomic_cas", "atomic_or", "atomic_and", "atomic_max", "atomic_min"):
            return True
        if name == "atomic_add" and re.search(r"\b0\b", ast.unparse(call.args[1])):
            return True
    return False


def unbounded_loops(function: ast.FunctionDef) -> list[int]:
    """Lines of the ``while`` loops whose condition follows memory and no clock."""
    lines = []
    for loop in ast.walk(function):
        if not isinstance(loop, ast.While):
            continue
        names = {node.id for node in ast.walk(loop.test) if isinstance(node, ast.Name)}
        polls, bounded = reads_shared_memory(loop.test), bool(CLOCK.search(ast.unparse(loop.test)))
        for node in ast.walk(loop):
            if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if names & {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}:
                    polls |= reads_shared_memory(node.value)
                    bounded |= bool(CLOCK.search(ast.unparse(node.value)))
        forever = isinstance(loop.test, ast.Constant)
        if (polls and not bounded) or forever:
            lines.append(loop.lineno)
    return lines


def unbounded_asm(function: ast.FunctionDef) -> list[int]:
    """Lines of assembly with a branch back to a label and no clock."""
    lines = []
    for node in ast.walk(function):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            continue
        text = node.value
        for label in re.finditer(r"^\s*([A-Za-z_$][\w$]*):\s*$", text, re.MULTILINE):
            branches_back = re.search(
                rf"\b(bra|s_c?branch\w*)\b[^;\n]*\b{re.escape(label.group(1))}\b", text[label.end() :]
            )
            if branches_back and not re.search(r"globaltimer|s_memrealtime", text):
                lines.append(node.lineno)
    return lines


def spins(source: str) -> list[int]:
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and is_jit(node)]
    return [line for function in functions for line in unbounded_loops(function) + unbounded_asm(function)]


def kernel_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if ".jit" in path.read_text(encoding="utf-8")]


def test_kernels_are_found() -> None:
    names = {path.relative_to(PACKAGE).as_posix() for path in kernel_files()}
    assert {"lang/waits.py", "gemm/kernels.py", "tp/ag_gemm.py"} <= names


@pytest.mark.parametrize("path", kernel_files(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_wait_without_a_deadline(path: Path) -> None:
    assert spins(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "body",
    [
        "while tl.load(p, volatile=True) < epoch:\n        x = 1",
        "seen = tl.atomic_add(p, 0)\n    while seen < epoch:\n        seen = tl.atomic_add(p, 0, sem='acquire')",
        "while tl.atomic_cas(p, 1, 0, sem='acquire') != 1:\n        x = 1",
        "while True:\n        x = 1",
        "seen = 0\n    while seen < e:\n        seen += tl.load(p)",
        "tl.inline_asm_elementwise('''\nPOLL:\n ld.acquire.sys.b32 s, [$1];\n @p bra POLL;\n''', '=r,l', [p])",
    ],
)
def test_the_check_sees_a_spin(body: str) -> None:
    assert spins(f"@triton.jit\ndef kernel(p, epoch):\n    {body}\n")


def test_the_check_lets_through_work_loops_and_bounded_waits() -> None:
    assert not spins(
        "@triton.jit(noinline=True)\ndef kernel(p, n):\n"
        "    work = tl.atomic_add(p, 1)\n    while work < n:\n        work = tl.atomic_add(p, 1)\n"
        "    seen = 0\n    waited = 0\n"
        "    while (seen < 1) & (waited < 5):\n        seen = tl.load(p)\n        waited = _clock() - start\n"
    )
    assert not spins("def host(p):\n    while True:\n        work()\n")


def unpinned_launches(source: str) -> list[int]:
    """Lines that launch a kernel, ``kernel[(programs,)](...)``, without the options of which its bits depend."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Subscript)
        and isinstance(node.func.slice, ast.Tuple)
        and not {"COMPILE_OPTIONS", "self._options"} & {ast.unparse(k.value) for k in node.keywords if k.arg is None}
    ]


def test_every_launch_pins_what_bits_depend_on() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): unpinned_launches(path.read_text()) for path in PACKAGE.rglob("*.py")
    }
    assert {path: lines for path, lines in found.items() if lines} == {}
    assert unpinned_launches("kernel[(1,)](x, num_warps=4)") == [1]
    assert unpinned_launches("kernel[(1,)](x, num_warps=4, **COMPILE_OPTIONS)\nlist[int](x)\ntable[0](x)") == []
