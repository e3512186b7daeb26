"""Libraries that are built otherwise than is expected run natively, with one log line, and no crash."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")
from ditron_train.megatron.plugin import switch
from ditron_train.megatron.shared import interfaces
from ditron_train.runtime import logs
from ditron_train.runtime.settings import under_policy
from tests.support.patience import HANG_S

_FOLDER = "transformer_engine.pytorch."
_NAMES = {
    "tp": (f"{_FOLDER}export", "is_in_onnx_export_mode"),
    "sp": (f"{_FOLDER}attention.dot_product_attention", "utils"),
    "ep": (f"{_FOLDER}tensor", "float8_tensor"),
}


def test_a_transformer_engine_that_lacks_names_leaves_its_layers_to_megatron():
    command = [sys.executable, str(Path(__file__).with_name("newer_transformer_engine.py"))]
    names = [":".join(name) for name in _NAMES.values()]
    root = str(Path(__file__).parents[2])
    done = subprocess.run([*command, *names], cwd=root, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for room, (_, name) in _NAMES.items():
        assert len(re.findall(rf"^{room} \(TE\): native, .* is built otherwise .*{name}", done.stdout, re.M)) == 1
    assert "ColumnParallelLinear, RowParallelLinear" in done.stdout and "DitronTE" not in done.stdout
    assert "what fails a self-check or is built otherwise runs natively" in done.stdout


@pytest.mark.parametrize("error", [ImportError, AttributeError, TypeError])
def test_classes_that_cannot_be_made_are_none(error, monkeypatch, caplog):
    def class_map():
        raise error("no such name")

    monkeypatch.setattr(logs, "_seen", {})
    caplog.set_level(logging.INFO, logger="ditron_train")
    words = f"tp (TE): native, this version of Transformer Engine is built otherwise ({error.__name__}: no such name)"
    assert interfaces.classes_of_te("tp", class_map) == interfaces.classes_of_te("tp", class_map) == {}
    assert [record.message for record in caplog.records] == [words]
    with under_policy("force"), pytest.raises(error):
        interfaces.classes_of_te("tp", class_map)
    assert interfaces.classes_of_te("tp", lambda: {int: bool}) == {int: bool}


def test_a_feature_that_megatron_lacks_something_for_is_native(monkeypatch, caplog):
    monkeypatch.setattr(logs, "_seen", {})
    caplog.set_level(logging.INFO, logger="ditron_train")
    start = switch._start

    def lacking(name):
        if name == switch.FEATURE_MODULES["sp"]:
            raise ImportError("cannot import name 'MLASelfAttention'")
        return start(name)

    monkeypatch.setattr(switch, "_start", lacking)
    try:
        switch.apply(features="tp,sp")
        assert switch.active_features() == ("tp",)
    finally:
        switch.restore()
    (line,) = [record.message for record in caplog.records if record.message.startswith("sp: ")]
    assert line.startswith("sp: native, ") and "MLASelfAttention" in line
