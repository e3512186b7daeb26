"""What `predict` says of its own error, against every committed step of a training job."""

from __future__ import annotations

from pathlib import Path

import pytest

from ditron_train.tools.predict.predictor import GAIN_ERRORS, NUM_STEPS, ROUGH_ERRORS
from documents.validation import Checked, check_steps, middle

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def checked() -> list[Checked]:
    return check_steps(ROOT)


def test_every_committed_step_is_estimated(checked: list[Checked]) -> None:
    assert len(checked) == NUM_STEPS
    assert all(
        one.stated.gain >= 1 and one.stated.step_ms == pytest.approx(one.row.native_us / 1e3) for one in checked
    )


def test_the_error_of_the_gain_is_the_one_that_is_stated(checked: list[Checked]) -> None:
    assert middle(one.gain_error for one in checked) == pytest.approx(GAIN_ERRORS, abs=0.005)


def test_the_error_of_the_rough_step_is_the_one_that_is_stated(checked: list[Checked]) -> None:
    assert middle(one.rough_error for one in checked) == pytest.approx(ROUGH_ERRORS, abs=0.005)


def test_fused_parts_were_fused_in_the_measured_jobs(checked: list[Checked]) -> None:
    """A feature whose parts are all native by the doctor's reasons has no measured gain to be compared with."""
    for one in checked:
        assert one.stated.parts or "pp" in one.row.op, one.row.model
