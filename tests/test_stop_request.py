"""A signal while the parts of a run are built ends the building, whatever the code in between makes of the exception."""

from __future__ import annotations

import signal

import pytest

from dflash_core.training.stop_request import StoppedWhileBuilding, StopRequest


def test_a_signal_raises_at_once() -> None:
    with StopRequest().listening() as stop, pytest.raises(StoppedWhileBuilding), stop.raising():
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("went on after the signal")


def test_a_signal_before_is_seen_at_the_start() -> None:
    with StopRequest().listening() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(StoppedWhileBuilding), stop.raising():
            pytest.fail("began although a stop was asked for")


@pytest.mark.parametrize("instead", [None, ValueError("could not determine the shape")])
def test_code_that_swallows_the_exception_is_stopped_all_the_same(instead: Exception | None) -> None:
    """As compiled code does that probes an object's attributes and clears any error."""
    with StopRequest().listening() as stop, pytest.raises(StoppedWhileBuilding), stop.raising():
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException:  # noqa: BLE001 - what a C function does
            if instead is not None:
                raise instead from None


def test_an_error_without_a_signal_stays_itself() -> None:
    with StopRequest().listening() as stop:
        with pytest.raises(ValueError, match="damaged"), stop.raising():
            raise ValueError("damaged")
        with stop.raising():
            pass
