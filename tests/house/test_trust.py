"""Nothing that comes from a store, a network or a file is unpickled or run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent.parent / "ditron_train"
#: Modules that unpickle, and functions that do, or that run text.
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FUNCTIONS = {
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "eval", "exec",
}  # fmt: skip
LOADERS = {"torch.load", "np.load", "numpy.load", "dist.checkpoint.load", "yaml.load", "yaml.unsafe_load"}


def trusting(source: str) -> list[str]:
    """What in ``source`` would run what somebody else wrote."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(alias.name for alias in node.names)]
            found += [name for name in names if name.split(".")[0] in MODULES | FUNCTIONS - {"eval", "exec"}]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.rpartition(".")[2]
            if name in LOADERS or name in ("eval", "exec") or last in FUNCTIONS - {"eval", "exec"}:
                found.append(name)
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_that_others_wrote_is_run(path: Path) -> None:
    assert trusting(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load(f)", "dist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list", "eval(text)", "np.load(path)", "import shelve as s",
    ],
)  # fmt: skip
def test_what_would_run_it_is_found(source: str) -> None:
    assert trusting(source)


def test_a_model_s_eval_is_none() -> None:
    assert trusting("model.eval()\njson.load(file)\nimport json") == []
