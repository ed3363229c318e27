"""Faults are counted each time, and logged once for each line of code that they come from."""

from __future__ import annotations

import pytest

from batchserve.faults import Faults

pytestmark = pytest.mark.faults


def test_faults_are_counted_by_where_and_logged_by_line(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults()

    def fail_here() -> None:
        raise ZeroDivisionError("the first")

    def fail_there() -> None:
        raise ZeroDivisionError("another")

    for _ in range(3):
        for fail in (fail_here, fail_there):
            with faults.contained("drafter", "nothing happens"):
                fail()
    faults.note("elsewhere", MemoryError(), "nothing happens")
    assert faults.counts == {"drafter": 6, "elsewhere": 1}
    assert [record.message.partition(";")[0] for record in caplog.records] == [
        "fault in drafter: nothing happens"
    ] * 2 + ["fault in elsewhere: nothing happens"]
    assert "the first" in caplog.text
    assert "another" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_program_passes(error: type[BaseException]) -> None:
    faults = Faults()
    with pytest.raises(error), faults.contained("drafter", "nothing happens"):
        raise error
    assert not faults.counts
