from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import plots


def test_every_plot_is_drawn_from_the_committed_results_and_shown_in_the_docs(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pages = [plots.IMAGES.parent.parent / "README.md", *plots.IMAGES.parent.glob("*.md")]
    texts = "".join(page.read_text() for page in pages)
    for path in plots.draw(tmp_path):
        assert "<path" in path.read_text()
        assert f"images/{path.name}" in texts
        assert (plots.IMAGES / path.name).exists()
