"""What the trainer is asked for, in its order, and outer steps when they are due."""

from __future__ import annotations

from queue import Empty

import pytest

from nolocod.trainer import pipe
from nolocod.trainer.requests import Requests


def asked(*commands: pipe.Command) -> Requests:
    requests = Requests()
    for number, command in enumerate(commands, 1):
        requests.put(pipe.Request(number, command))
    return requests


def number(requests: Requests, steps: int | None) -> int:
    """Of the next request; 0 if none is due."""
    try:
        request = requests.next(0.0, steps)
    except Empty:
        return 0
    assert request is not None
    return request.id


@pytest.mark.parametrize("command", [pipe.Capture(0, 5), pipe.Solo(1, 0, 5)])
def test_an_outer_step_waits_for_the_inner_steps_before_it(command: pipe.Command) -> None:
    requests = asked(command)
    assert [number(requests, steps) for steps in (4, 4, 5, 5)] == [0, 0, 1, 0]


def test_one_that_is_late_is_taken_at_once() -> None:
    assert number(asked(pipe.Capture(0, 5)), 7) == 1


def test_where_no_inner_steps_are_taken_nothing_waits() -> None:
    requests = asked(pipe.Capture(0, 5))
    assert number(requests, 4) == 0
    assert number(requests, None) == 1, "a pause came"


@pytest.mark.parametrize("command", [pipe.Capture(0, 5), pipe.Solo(1, 0, 5)])
def test_what_was_given_up_before_it_was_due_is_not_done(command: pipe.Command) -> None:
    requests = asked(command, pipe.Discard())
    assert [number(requests, steps) for steps in (4, 4, 4, 5)] == [0, 2, 0, 0]
    requests = asked(command, pipe.Capture(0, 6))
    assert [number(requests, steps) for steps in (4, 4, 5, 6)] == [0, 0, 0, 2]


def test_the_end_is_heard_at_once() -> None:
    requests = asked(pipe.Capture(0, 5))
    assert number(requests, 4) == 0
    requests.put(None)
    assert requests.next(0.0, 4) is None
