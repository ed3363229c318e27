"""Draws lines and points as SVG: axes with ticks, a legend, colours that the page around it defines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 76, 20, 16, 54  # around the area of the points; the legend is above TOP
LEGEND_ROW, LETTER = 22, 7.2  # pixels
NUM_COLOURS = 6
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Series:
    """Points with a line through them, in this order. Points that are not finite are left out.

    labels: a text beside each point. colour: an index, below NUM_COLOURS. faint: further points without a line, such as
    the single measurements behind a median. is_ring: a ring around each point, without a line.
    """

    name: str
    points: Sequence[Point]
    labels: Sequence[str] = ()
    colour: int = 0
    is_dashed: bool = False
    faint: Sequence[Point] = ()
    is_ring: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """marks: vertical lines, with the text beside each. Axes that are not logarithmic begin at 0."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[tuple[float, str]] = ()
    is_log: bool = False

    def svg(self) -> str:
        """Returns the plot as one element of well-formed XML."""
        return "\n".join(_Drawing(self).elements())


@dataclass(frozen=True, slots=True)
class _Axis:
    """Where values lie along one side of the plot, in pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool
    ticks: list[float] = field(default_factory=list)

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float, is_log: bool) -> _Axis:
        if is_log:
            positive = [value for value in values if value > 0] or [1.0]
            low, high = min(positive) / 1.1, max(positive) * 1.1
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            ticks = [base * 10.0**power for power in powers for base in (1, 2, 5)]
            inside = [tick for tick in ticks if low <= tick <= high]
            return cls(low, high, start, end, True, inside or [float(f"{(low * high) ** 0.5:.2g}")])
        high = max([*values, 0.0]) * 1.06 or 1.0
        step = _nice_step(high)
        return cls(0.0, high, start, end, False, [i * step for i in range(int(high / step) + 1)])

    def at(self, value: float) -> float:
        low, high, value = (math.log(each) if self.is_log else each for each in (self.low, self.high, value))
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 2)


def _nice_step(high: float) -> float:
    """Returns 1, 2 or 5 times a power of ten, so that there are 4 to 10 ticks."""
    power = 10.0 ** math.floor(math.log10(high / 4))
    return max(base * power for base in (1, 2, 5) if base * power <= high / 4)


class _Drawing:
    def __init__(self, plot: Plot) -> None:
        self.plot = plot
        self.series = [each for each in plot.series if any(map(self._is_drawn, each.points))]
        everything = [point for each in self.series for point in (*each.points, *each.faint) if self._is_drawn(point)]
        self.legend, num_rows = self._legend()
        self.top = TOP + num_rows * LEGEND_ROW
        xs = [x for x, _ in everything] + [x for x, _ in plot.marks]
        self.x = _Axis.over(xs, LEFT, WIDTH - RIGHT, plot.is_log)
        self.y = _Axis.over([y for _, y in everything], self.top + HEIGHT - BOTTOM, self.top, plot.is_log)

    def _is_drawn(self, point: Point) -> bool:
        return all(math.isfinite(value) and (value > 0 or not self.plot.is_log) for value in point)

    def elements(self) -> Iterator[str]:
        height = self.y.start + BOTTOM
        yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" role="img">'
        yield f"<title>{escape(self.plot.title)}</title>"
        yield from self.legend
        for tick in self.x.ticks:
            yield _line("grid", self.x.at(tick), self.y.start, self.x.at(tick), self.y.end)
            yield _text(self.x.at(tick), self.y.start + 18, f"{tick:g}", anchor="middle")
        for tick in self.y.ticks:
            yield _line("grid", self.x.start, self.y.at(tick), self.x.end, self.y.at(tick))
            yield _text(self.x.start - 8, self.y.at(tick) + 4, f"{tick:g}", anchor="end")
        yield _line("axis", self.x.start, self.y.start, self.x.end, self.y.start)
        yield _line("axis", self.x.start, self.y.start, self.x.start, self.y.end)
        yield _text((self.x.start + self.x.end) / 2, self.y.start + 42, self.plot.x_label, anchor="middle")
        y = (self.y.start + self.y.end) / 2
        yield _text(16, y, self.plot.y_label, anchor="middle", turn=f' transform="rotate(-90 16 {y:g})"')
        for x, text in self.plot.marks:
            yield _line("mark", self.x.at(x), self.y.start, self.x.at(x), self.y.end)
            yield _text(self.x.at(x) - 6, self.y.end + 12, text, anchor="end")
        for each in self.series:
            yield from self._drawn(each)
        yield "</svg>"

    def _drawn(self, series: Series) -> Iterator[str]:
        places = [(self.x.at(x), self.y.at(y)) for x, y in filter(self._is_drawn, series.points)]
        for x, y in filter(self._is_drawn, series.faint):
            yield f'<circle class="c{series.colour} faint" cx="{self.x.at(x):g}" cy="{self.y.at(y):g}" r="2.5"/>'
        if not series.is_ring:
            drawn = " ".join(f"{x:g},{y:g}" for x, y in places)
            yield f'<polyline class="c{series.colour}{" dashed" if series.is_dashed else ""}" points="{drawn}"/>'
        radius, kind = (9, " ring") if series.is_ring else (4, "")
        for x, y in places:
            yield f'<circle class="c{series.colour}{kind}" cx="{x:g}" cy="{y:g}" r="{radius}"/>'
        for (x, y), text in zip(series.points, series.labels, strict=False):
            if self._is_drawn((x, y)):
                yield _text(self.x.at(x) + 7, self.y.at(y) + 15, text)

    def _legend(self) -> tuple[list[str], int]:
        """Returns the elements of the legend, and how many rows they take."""
        elements, x, row = [], float(LEFT), 1
        for series in self.series:
            width = 44 + LETTER * len(series.name)
            if x + width > WIDTH and x > LEFT:
                x, row = LEFT, row + 1
            y, kind = TOP + (row - 1) * LEGEND_ROW, "dashed" if series.is_dashed else ""
            if series.is_ring:
                elements.append(f'<circle class="c{series.colour} ring" cx="{x + 13:g}" cy="{y}" r="7"/>')
            else:
                elements.append(_line(f"c{series.colour} {kind}", x, y, x + 26, y))
            elements.append(_text(x + 32, y + 4, series.name))
            x += width
        return elements, row


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind.strip()}" x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", turn: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{turn}>{escape(text)}</text>'
