"""Plots are well-formed XML with every point where its values say; reports escape all text and load nothing."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest

from batchserve.html_report import Report, Table
from batchserve.svg_plot import BOTTOM, LEFT, RIGHT, WIDTH, Plot, Series

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*series: Series, **options) -> ElementTree.Element:
    return ElementTree.fromstring(Plot("title", "x", "y", series, **options).svg())


def circles(root: ElementTree.Element, kind: str) -> list[tuple[float, float]]:
    found = [each for each in root.iter(f"{SVG}circle") if each.get("class") == kind]
    return [(float(each.get("cx", "")), float(each.get("cy", ""))) for each in found]


def ticks(root: ElementTree.Element) -> dict[str, tuple[float, float]]:
    return {each.text or "": (float(each.get("x", "")), float(each.get("y", ""))) for each in root.iter(f"{SVG}text")}


def height_of(root: ElementTree.Element) -> float:
    return float(root.get("viewBox", "").split()[3])


def test_points_are_where_their_values_say():
    root = drawn(Series("s", [(0, 0), (5, 50), (10, 100)]))
    first, middle, last = circles(root, "c0")
    assert first[0] == LEFT
    assert first[1] == height_of(root) - BOTTOM
    assert middle == pytest.approx(((first[0] + last[0]) / 2, (first[1] + last[1]) / 2), abs=0.02)
    assert LEFT < last[0] < WIDTH - RIGHT, "all of the last point is inside"
    assert last[1] < middle[1] < first[1], "larger is higher"
    named = ticks(root)
    assert named["10"][0] == last[0]
    assert named["100"][1] - 4 == pytest.approx(last[1])
    (line,) = root.iter(f"{SVG}polyline")
    assert line.get("points") == " ".join(f"{x:g},{y:g}" for x, y in (first, middle, last))


def test_equal_ratios_are_equal_distances_on_logarithmic_axes():
    root = drawn(Series("s", [(1, 10), (10, 1000), (100, 100000), (0, 5)]), is_log=True)
    places = circles(root, "c0")
    assert len(places) == 3, "0 has no place"
    (x1, y1), (x2, y2), (x3, y3) = places
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.02)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.02)
    assert {"1", "2", "5", "10", "20", "50", "100"} <= ticks(root).keys()


def test_what_is_not_a_number_is_left_out():
    root = drawn(Series("s", [(1, math.nan), (2, 3)], labels=("a", "b")), Series("none", [(math.nan, 1)], colour=1))
    assert len(circles(root, "c0")) == 1
    texts = ticks(root)
    assert "b" in texts
    assert "a" not in texts
    assert "none" not in texts, "a series without points is not in the legend"


def test_a_plot_of_nothing_is_still_one():
    assert drawn(Series("s", [])).tag == f"{SVG}svg"
    assert drawn(is_log=True).tag == f"{SVG}svg"


def test_faint_points_rings_marks_and_dashes_are_drawn():
    series = Series("s", [(1, 2)], faint=[(1, 1), (1, 3)], is_dashed=True, colour=3)
    root = drawn(series, Series("ring", [(1, 2)], is_ring=True), marks=[(4.0, "target")])
    assert len(circles(root, "c3 faint")) == 2
    assert circles(root, "c0 ring")[-1] == circles(root, "c3")[0]
    (line,) = root.iter(f"{SVG}polyline")
    assert line.get("class") == "c3 dashed"
    (mark,) = (each for each in root.iter(f"{SVG}line") if each.get("class") == "mark")
    assert float(mark.get("x1", "")) > circles(root, "c3")[0][0]
    assert "target" in ticks(root)


def test_a_legend_that_is_wide_takes_more_rows():
    one = drawn(Series("s", [(1, 1)]))
    many = drawn(*(Series("a rather long name " * 2, [(1, 1)]) for _ in range(6)))
    assert float(many.get("viewBox", "").split()[3]) > float(one.get("viewBox", "").split()[3])
    assert all(x < WIDTH for x, _ in ticks(many).values())


def test_texts_are_escaped_and_nothing_is_loaded():
    evil = '<b a="1">&\'</b>'
    report = Report(evil)
    report.heading(evil)
    report.text(evil)
    report.code(evil)
    report.facts([(evil, evil)])
    report.plot(Plot(evil, evil, evil, [Series(evil, [(1, 1)], labels=[evil])], marks=[(1, evil)]))
    report.table(Table([evil, "n"], [[evil, "1"], ["b", "2"]], bold=1))
    page = report.html()
    assert "<b a" not in page
    root = ElementTree.fromstring(page.removeprefix("<!doctype html>"))
    assert root.findtext("body/h1") == evil
    assert evil in {each.text for each in root.iter(f"{SVG}text")}
    assert [each.text for each in root.iter("td")] == [evil, "1", "b", "2"]
    assert [each.get("class") for each in root.iter("tr")] == [None, None, "bold"]
    assert not {"script", "link", "img", "iframe"} & {each.tag for each in root.iter()}
    assert "url(" not in page
    assert "@import" not in page
    assert "prefers-color-scheme:dark" in page
