"""Switches features on in megatron-core and off again.

A feature is a module ``ditron_train.megatron.<name>`` that defines

- ``class_map() -> dict[type, type]``: megatron-core's classes and the subclasses that replace them;

and, if it needs them,

- ``symbols() -> list[tuple[object, object]]``: objects that are replaced by name (functions and the like);
- ``start()`` and ``stop()``: called once when the feature is switched on, and when it is switched off.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from ditron_train.data.tuning_table import check_table
from ditron_train.megatron.plugin import failures, lifecycle, patching
from ditron_train.megatron.plugin.arguments import (
    DET,
    FEATURE_MODULES,
    LOSS,
    WGRAD,
    Options,
    options_of,
    parse_features,
    with_environment,
)
from ditron_train.megatron.plugin.record_steps import record_steps
from ditron_train.megatron.plugin.specs import is_spec, rewrite_spec
from ditron_train.megatron.shared.interfaces import unsupported_reason_otherwise
from ditron_train.policy import add_switch, check_plan, forget_plans, log_native
from ditron_train.policy.gate import INTERFACE_ERRORS
from ditron_train.runtime.errors import SettingError, VersionError
from ditron_train.runtime.logs import log_once
from ditron_train.runtime.settings import get_settings, unknown_variables
from ditron_train.runtime.versions import check_versions

_started: dict[str, ModuleType] = {}
_patched: list[str] = []
_saved_environment: dict[str, str | None] = {}


def active_features() -> tuple[str, ...]:
    """The features that `apply` has switched on for newly built models without an edit of their spec."""
    return tuple(_patched)


def apply(
    spec: Any = None,
    features: str | Sequence[str] = ("tp",),
    *,
    transport: str | None = None,
    timeout_s: float | None = None,
    policy: str | None = None,
    plan: str | None = None,
) -> Any:
    """Switches `features` on: in one layer spec, or (without a spec) in every model built from now on.

    Args:
        spec: A ``ModuleSpec`` or ``TransformerBlockSubmodules``; Megatron's parsed arguments are taken by `apply_args`
            instead. A rewritten copy is returned and only models built
            from it are accelerated; modules that ``GPTModel`` hard-codes (its output layer) stay native. None: calls
            of megatron-core's own classes build the fused ones, the output layer included, and None is returned.
        features: Names as after ``--ditron``: a sequence, or one string with commas.
        transport: Sets ``DITRON_TRANSPORT`` until `restore`.
        timeout_s: Sets ``DITRON_TIMEOUT_S`` until `restore`.
        policy: Sets ``DITRON_POLICY`` (``strict``, ``fast``, ``bits`` or ``force``) until `restore`.
        plan: Sets ``DITRON_PLAN``, the file of decisions, until `restore`.

    With any feature, ``wgrad`` provides the module of Megatron's gradient accumulation fusion if apex's is missing
    (``DITRON_WGRAD``), ``loss`` takes the place of Megatron's unfused cross entropy if it is faster
    (``DITRON_LOSS``), and in deterministic mode ``det`` switches PyTorch's fill of new tensors off and sums
    gradients of embeddings faster (``DITRON_DET``).

    Calling it again adds features and changes nothing for those already on. Only if NVSHMEM will be needed (several
    nodes, or it is asked for) a call after ``initialize_model_parallel`` is a call of all ranks of the job.

    Raises:
        SettingError: An unknown feature or setting, names in place of a spec, a plan that is unreadable, foreign
            or stale, or an unreadable tuning table.
        VersionError: A library outside the supported range.
    """
    if isinstance(spec, argparse.Namespace):  # as a framework calls its init hook
        return apply_args(spec)
    return apply_options(Options(parse_features(features), transport, timeout_s, policy, plan), spec)


def apply_options(options: Options, spec: Any = None) -> Any:
    """`apply` for options that were parsed from a command line; no feature at all changes nothing."""
    if isinstance(spec, str):
        raise SettingError(f"{spec!r} is no layer spec: apply(features={spec!r}) switches features on for every model")
    if spec is not None and not is_spec(spec):
        raise SettingError(f"{spec!r} is no layer spec: a ModuleSpec or TransformerBlockSubmodules is expected")
    if options.record is not None:
        record_steps(options.record, options.features, options.record_trace)
    elif options.record_trace is not None:
        raise SettingError("--ditron-record-trace needs --ditron-record, the folder that it goes to")
    for words in options.idle():
        log_once(words, words, level=logging.WARNING)
    if not options.overlapping:
        if options.features or options.fuses_wgrad:
            _start(FEATURE_MODULES[WGRAD])
        if DET in options.features:
            _start(FEATURE_MODULES[DET])
        if DET in options.features or LOSS in options.features:
            _feature(LOSS)
        return spec
    try:
        check_versions()
    except VersionError as error:
        if not options.from_environment:
            raise
        log_once(f"versions {error}", f"everything is native: {error}", level=logging.WARNING)
        return spec
    from ditron_train.megatron.compat.batch_invariant import is_batch_invariant_mode_enabled

    add_switch("batch invariant", is_batch_invariant_mode_enabled)
    with _environment(options.environment()):
        get_settings()  # a malformed variable is reported here, before any model is built
        check_plan(options.deciding_sizes)
        check_table()
    for name in unknown_variables():
        log_once(f"unknown {name}", f"nothing reads the environment variable {name}", level=logging.WARNING)
    modules = {name: module for name in options.overlapping if (module := _feature(name)) is not None}
    _start(FEATURE_MODULES[WGRAD])  # only a job that Megatron would refuse sees a difference
    _start(FEATURE_MODULES[DET])  # only a job in deterministic mode does
    _feature(LOSS)
    failures.start()
    lifecycle.start()
    _start("ditron_train.megatron.plugin.job_start").announce(tuple(modules))
    if spec is not None and not modules:
        return spec
    if spec is not None:
        classes = {native: fused for module in modules.values() for native, fused in _classes(module).items()}
        names, (rewritten, number) = ", ".join(modules), rewrite_spec(spec, classes)
        level = logging.INFO if number else logging.WARNING
        log_once(f"spec {names} {number}", f"{names}: {number} modules of the layer spec replaced", level=level)
        return rewritten
    for name, module in modules.items():
        _patch(name, module)
    return None


def _feature(name: str) -> ModuleType | None:
    """The feature, switched on; None if this Megatron-core lacks what it is written with."""
    try:
        return _start(FEATURE_MODULES[name])
    except INTERFACE_ERRORS as error:
        log_native(name, unsupported_reason_otherwise("Megatron-core, or of what it needs,", error))
        return None


def _start(name: str) -> ModuleType:
    module = importlib.import_module(name)
    if name not in _started:
        if hasattr(module, "start"):
            module.start()
        _started[name] = module
    return module


def _classes(module: ModuleType) -> dict[type, type]:
    """What a feature replaces. The fused classes have the names of the native ones, since Megatron-FSDP and
    converters of checkpoints tell layers apart by the names of their classes; pickles find them by ``__qualname__``,
    which stays."""
    classes: dict[type, type] = module.class_map()
    for native, fused in classes.items():
        fused.__name__ = native.__name__
    return classes


def _patch(name: str, module: ModuleType) -> None:
    classes = _classes(module)
    for native, fused in classes.items():
        patching.redirect_construction(native, fused)
    for native, fused in module.symbols() if hasattr(module, "symbols") else ():
        patching.replace_symbol(native, fused)
    if name not in _patched and classes:
        _patched.append(name)
        listed = ", ".join(sorted(native.__name__ for native in classes))
        log_once(f"patched {name}", f"{name}: on for models built from now on ({listed})")


def restore() -> None:
    """Undo every `apply`: models built from now on are native, and the environment is as before. Idempotent.

    Models that exist already keep their modules.
    """
    patching.undo_all()
    _patched.clear()
    forget_plans()
    while _started:
        module = _started.popitem()[1]
        if hasattr(module, "stop"):
            module.stop()
    failures.stop()
    lifecycle.stop()
    while _saved_environment:
        _set_variable(*_saved_environment.popitem())


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Sets variables until `restore`; if what is inside refuses them they are at once as before."""
    before, saved = {name: os.environ.get(name) for name in values}, dict(_saved_environment)
    for name, value in values.items():
        _saved_environment.setdefault(name, before[name])
        os.environ[name] = value
    try:
        yield
    except BaseException:
        for name, earlier in before.items():
            _set_variable(name, earlier)
        _saved_environment.clear()
        _saved_environment.update(saved)
        raise


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def apply_args(args: Any) -> None:
    """`apply` for every model built from now on, with the options in `args`, Megatron's parsed arguments.

    For pretraining scripts that are edited, from megatron-core 0.18 on: ``args = parse_and_validate_args(
    extra_args_provider=add_ditron_args)``, then this, before ``pretrain``. Arguments that name no feature leave it to
    ``DITRON``; a warning says so if they have no ``--ditron`` group and ``DITRON`` is not set either.

    Raises:
        SettingError, VersionError: As `apply`.
    """
    options = options_of(args)
    if not options.features and not hasattr(args, "ditron"):
        _warn_of_nothing("apply_args")
    apply_options(options)


def enable(*_: Any, **__: Any) -> None:
    """`apply` with the features that ``DITRON`` names, for every model built from now on. Whatever it is called with
    is ignored, so that it fits frameworks' init hooks. A warning if the variable is not set; an unsupported version is
    one log line, and everything stays native.

    Raises:
        SettingError: As `apply`.
    """
    options = with_environment(Options())
    if not options.features:
        _warn_of_nothing("enable")
    apply_options(options)


def _warn_of_nothing(function: str) -> None:
    words = f"{function}: neither --ditron nor DITRON names a feature: everything is native"
    log_once(words, words, level=logging.WARNING)


def wrap_model_provider(model_provider: Any) -> Any:
    """Returns `model_provider` preceded by `apply` with the options of ``megatron.training.get_args()``.

    For pretraining scripts that are edited: with megatron-core 0.16 and 0.17 pass
    ``extra_args_provider=add_ditron_args`` and the wrapped provider to ``megatron.training.pretrain``. Later versions
    take no such argument there, and may build a model without a provider: `apply_args`.
    """

    @functools.wraps(model_provider)
    def provider(*args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        options = options_of(get_args())
        apply_options(options)
        if options.overlapping:
            # Every rank of Megatron's training builds its part of the model.
            _start("ditron_train.megatron.plugin.job_start").rendezvous()
        return model_provider(*args, **kwargs)

    return provider
