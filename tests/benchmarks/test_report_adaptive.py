"""What the report says in words."""

from __future__ import annotations

import pytest

from benchmarks import report_adaptive


def test_the_least_cell_of_the_breadth_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = {"trie": (1.02, 0.951, 0.93), "reference": (0.9, 1.1, 0.95)}
    drafters = {
        drafter: {"text": {size: {"adaptive_over_best": r} for size, r in zip(("1", "16", "trace"), of, strict=True)}}
        for drafter, of in ratios.items()
    }
    monkeypatch.setattr(report_adaptive, "read", lambda name: {"drafters": drafters})
    expected = "The least of these 6 cells is 90.0% (reference, text, 1); below 95%: 2."
    assert report_adaptive.breadth_least() == expected
    drafters["reference"]["text"]["1"]["adaptive_over_best"] = 1.0
    assert "93.0% (trie, text, 1 to 32); below 95%: 1." in report_adaptive.breadth_least()
