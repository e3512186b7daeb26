"""The environment's settings: what is unset, what is understood, what is refused; and whose log lines are written."""

from __future__ import annotations

import logging

import pytest

from ditron_train.runtime import logs
from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.settings import SETTINGS, get_settings, unknown_variables


def test_unset_and_empty_variables_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for index, setting in enumerate(SETTINGS.values()):
        if index % 2:
            monkeypatch.setenv(setting.variable, "")
        else:
            monkeypatch.delenv(setting.variable, raising=False)
    settings = get_settings()
    assert {name: getattr(settings, name) for name in SETTINGS} == {name: s.default for name, s in SETTINGS.items()}


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("DITRON_TRANSPORT", "nvshmem", "transport", "nvshmem"),
        ("DITRON_TIMEOUT_S", "2.5", "timeout_s", 2.5),
        ("DITRON_ARENA_BYTES", "1048576", "arena_bytes", 1 << 20),
        ("DITRON_ARENA_BYTES", "256M", "arena_bytes", 256 << 20),
        ("DITRON_ARENA_BYTES", "1.5GiB", "arena_bytes", 3 << 29),
        ("DITRON_PP_LEASES", "0", "pp_leases", 0),
        ("DITRON_POLICY", "bits", "policy", "bits"),
    ],
)
def test_good_values(variable: str, text: str, field: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(get_settings(), field) == value


@pytest.mark.parametrize(
    ("variable", "texts"),
    [
        ("DITRON_TRANSPORT", ["tcp"]),
        ("DITRON_TIMEOUT_S", ["soon", "0", "-1", "inf", "nan", "1e308", "1e-9"]),
        ("DITRON_ARENA_BYTES", ["much", "0", "-5M", "1T", "inf", "nan"]),
        ("DITRON_PP_SLOTS", ["0", "two", "99999999999999999999"]),
        ("DITRON_PP_LEASES", ["-1", "1.5"]),
        ("DITRON_EP_CAPACITY", ["0", "1e308"]),
    ],
)
def test_bad_values_are_refused_by_name(variable: str, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for text in texts:
        monkeypatch.setenv(variable, text)
        with pytest.raises(SettingError, match=f"{variable}='{text}': "):
            get_settings()


@pytest.mark.parametrize("variable", [setting.variable for setting in SETTINGS.values() if setting.parse != "text"])
@pytest.mark.parametrize("text", ["\N{COLLISION SYMBOL}", "-1", "nan", "1e400", "9" * 5000, " ", "[/bold]"])
def test_no_setting_takes_what_it_cannot_be(variable: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that name files say so where they are read."""
    monkeypatch.setenv(variable, text)
    with pytest.raises(SettingError, match=f"^{variable}='"):
        get_settings()


def test_misspelt_variables_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITRON_TIMOUT_S", "5")
    assert unknown_variables() == ["DITRON_TIMOUT_S"]
    assert unknown_variables(["DITRON_TEST_STEPS", "DITRON_POLICY", "PATH"]) == []


def test_a_former_name_is_read_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITRON_PP_LOANS", "3")
    with pytest.warns(FutureWarning, match="DITRON_PP_LOANS is now called DITRON_PP_LEASES"):
        assert get_settings().pp_leases == 3
    assert unknown_variables() == []
    monkeypatch.setenv("DITRON_PP_LEASES", "4")
    assert get_settings().pp_leases == 4


@pytest.mark.parametrize(("rank", "lines"), [("0", ["a shape went native"]), ("1", [])])
def test_a_line_is_logged_once_and_on_rank_0_alone(
    rank: str, lines: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(logs, "_seen", {})
    with caplog.at_level(logging.INFO, "ditron_train"):
        for _ in range(3):
            logs.log_once("a key", "a shape went native")
    assert caplog.messages == lines
