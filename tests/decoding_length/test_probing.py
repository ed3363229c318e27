from __future__ import annotations

from itertools import pairwise

from batchserve.decoding_length.probing import LONGEST_WAIT, PATIENCE, Probe


def asked_in(probe: Probe, steps: int, *, is_paying: bool, text: list[int] | None = None) -> list[int]:
    """The steps in which the drafter is asked, when each asking turns out so."""
    asked = []
    for step in range(steps):
        if probe.is_due():
            asked.append(step)
            probe.note(is_paying, text or [])
        probe.arrive([1000 + step])
    return asked


def test_a_drafter_that_pays_is_asked_in_every_step() -> None:
    assert asked_in(Probe(), 50, is_paying=True) == list(range(50))


def test_one_that_does_not_is_asked_ever_more_rarely() -> None:
    asked = asked_in(Probe(), 400, is_paying=False)
    gaps = [b - a for a, b in pairwise(asked)]
    assert gaps[: PATIENCE + 3] == [1] * PATIENCE + [3, 5, 9]
    assert gaps == sorted(gaps)
    assert gaps[-1] == LONGEST_WAIT + 1


def test_those_who_wait_longest_are_asked_in_the_same_steps() -> None:
    probes = {begin: Probe() for begin in (0, 3, 17, 90)}
    asked: dict[int, list[int]] = {begin: [] for begin in probes}
    for step in range(600):
        for begin, probe in probes.items():
            if step >= begin and probe.is_due():
                asked[begin].append(step)
                probe.note(False, [], step=step)
    late = [[step for step in steps if step >= 300] for steps in asked.values()]
    assert late[0] == late[1] == late[2] == late[3]
    assert [b - a for a, b in pairwise(late[0])] == [LONGEST_WAIT] * (len(late[0]) - 1)


def test_one_success_brings_it_back_at_once() -> None:
    probe = Probe()
    asked_in(probe, 200, is_paying=False)
    while not probe.is_due():
        pass
    probe.note(True, [])
    assert asked_in(probe, 10, is_paying=True) == list(range(10))


def test_text_that_begins_to_repeat_itself_is_worth_a_look_now() -> None:
    probe, text = Probe(), list(range(40))
    for _ in range(PATIENCE + 6):
        while not probe.is_due():
            pass
        probe.note(False, text)
    assert probe.wait > 10
    probe.arrive([3, 4, 5, 6, 7, 8, 9])
    assert probe.is_due()


def test_text_that_goes_on_as_before_is_not() -> None:
    probe = Probe()
    for _ in range(PATIENCE + 6):
        while not probe.is_due():
            pass
        probe.note(False, [1, 2, 3, 4])
    wait = probe.wait
    probe.arrive(list(range(100, 110)))
    assert probe.wait == wait
