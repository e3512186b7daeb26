"""Run by itself: the features on beside a Transformer Engine that lacks the names in ``sys.argv`` (MODULE:NAME).

The log says what is replaced. Everything else of it is simulated: names without a content.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
import types
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "native"))
import te_sources  # noqa: E402

_MISSING = {tuple(one.split(":")) for one in sys.argv[1:]}
_MODULES = ("Linear", "LayerNormLinear", "GroupedLinear", "DotProductAttention", "LayerNorm", "RMSNorm")
_FUNCTIONS = ("_Linear", "_LayerNormLinear", "_GroupedLinear")


class _Simulated(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name):
        if name == "__version__":
            return "2.21.0"
        if name.startswith("__") or (self.__name__, name) in _MISSING:
            raise AttributeError(f"module {self.__name__} has no attribute {name}")
        made = sys.modules.get(f"{self.__name__}.{name}") or self._made(name)
        setattr(self, name, made)
        return made

    def _made(self, name):
        if name in _MODULES:
            forward = {"__module__": self.__name__, "forward": lambda self, *given, **more: None}
            return type(name, (torch.nn.Module,), forward)
        if name in _FUNCTIONS:
            return type(name, (torch.autograd.Function,), {"forward": staticmethod(lambda ctx, *given: None)})
        return te_sources._named(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        is_simulated = fullname.split(".")[0] in ("transformer_engine", "transformer_engine_torch")
        if is_simulated and tuple(fullname.rsplit(".", 1)) not in _MISSING:
            return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def create_module(self, spec):
        return _Simulated(spec.name)

    def exec_module(self, module):
        pass


if __name__ == "__main__":
    sys.meta_path.insert(0, _Finder())
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    import megatron.core.extensions.transformer_engine as native

    from ditron_train.megatron import apply

    assert native.HAVE_TE
    apply(features="tp,sp,ep")
