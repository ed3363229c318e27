"""The terminal output of the demo: streamed answers, progress and a table."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from batchserve.demo.measure import Round, median_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import RenderableType

REFRESH_PER_S = 8
SPINNER_PER_S = 2
SPINNER_CHARS = 3
MIN_PANEL_LINES = 3
PANEL_FRAME_CHARS = 4


class View:
    """Writes to the terminal. To a pipe or a file it writes plain lines instead of live displays."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)

    def say(self, line: str) -> None:
        """Prints one line."""
        self.console.print(escape(line), soft_wrap=True)

    @contextmanager
    def waiting(self, text: str) -> Iterator[Callable[[str], None]]:
        """Shows that work is in progress. Yields a function that takes status messages."""
        if not self.console.is_terminal:
            self.say(text)
            yield lambda line: self.say(f"  {line}")
            return
        # The spinner turns slowly, because it shares the CPU with the measurement.
        with self.console.status(_one_line(text, self.console), refresh_per_second=SPINNER_PER_S) as status:
            yield lambda line: status.update(_one_line(f"{text}: {line}", self.console))

    @contextmanager
    def streaming(self, heading: str, titles: Sequence[str]) -> Iterator[Callable[[int, str], None]]:
        """Shows answers as they stream. Yields a function that takes (index of the answer, its next text)."""
        if not self.console.is_terminal:
            self.say(heading)
            lines = _Lines(titles, self.say)
            yield lines.add
            lines.flush()
            return
        panels = _Panels(heading, titles, self.console)
        with Live(get_renderable=panels.render, console=self.console, refresh_per_second=REFRESH_PER_S):
            yield panels.add

    def table(self, off: Sequence[Round], on: Sequence[Round], identical: str) -> None:
        """Prints the results. Every figure is the median over the rounds."""
        table = Table(title=f"{len(off[0].answers)} requests at once, medians of {len(off)} rounds")
        table.add_column("", no_wrap=True)
        for name in ("speculation off", "speculation on", "on / off"):
            table.add_column(name, justify="right")
        for name, figure, scale, form in _ROWS:
            before, after = median_of(off, figure), median_of(on, figure)
            if math.isnan(before + after):  # answers of one token have no inter-token latency
                table.add_row(name, "-", "-", "")
                continue
            ratio = f"{after / before:.2f}" if before else ""
            table.add_row(name, form.format(before * scale), form.format(after * scale), ratio)
        table.add_row("outputs identical", "", identical, "")
        self.console.print(table)
        self.say("acceptance length: tokens of one verified step. inter-token latency: a step's time over its tokens.")


_ROWS: tuple[tuple[str, Callable[[Round], float], float, str], ...] = (
    ("tokens/s", lambda done: done.tokens_per_s, 1, "{:.0f}"),
    ("TTFT, mean (ms)", lambda done: done.ttft_s, 1e3, "{:.1f}"),
    ("inter-token latency, mean (ms)", lambda done: done.mean_itl_s, 1e3, "{:.2f}"),
    ("inter-token latency, p99 (ms)", lambda done: done.p99_itl_s, 1e3, "{:.2f}"),
    ("gap between messages, p99 (ms)", lambda done: done.p99_gap_s, 1e3, "{:.2f}"),
    ("acceptance length", lambda done: done.acceptance_length, 1, "{:.2f}"),
)


def _one_line(text: str, console: Console) -> Text:
    line = Text(text)
    line.truncate(max(1, console.width - SPINNER_CHARS), overflow="ellipsis")
    return line


class _Lines:
    """Prints each answer's text line by line, as soon as a line is complete."""

    def __init__(self, titles: Sequence[str], say: Callable[[str], None]) -> None:
        self._prefixes = [f"  [{i + 1} {title}] " for i, title in enumerate(titles)]
        self._pending = [""] * len(titles)
        self._say = say

    def add(self, index: int, text: str) -> None:
        *lines, self._pending[index] = (self._pending[index] + text).split("\n")
        for line in lines:
            self._say(self._prefixes[index] + line)

    def flush(self) -> None:
        for prefix, rest in zip(self._prefixes, self._pending, strict=True):
            if rest:
                self._say(prefix + rest)


class _Panels:
    """Shows the last lines of each answer, in two panels per row, no higher than the terminal."""

    def __init__(self, heading: str, titles: Sequence[str], console: Console) -> None:
        self._heading = heading
        self._titles = titles
        self._texts = [""] * len(titles)
        self._console = console
        rows = -(-len(titles) // 2)
        self._lines = max(MIN_PANEL_LINES, (console.height - 2) // rows - 2)

    def add(self, index: int, text: str) -> None:
        self._texts[index] += text

    def render(self) -> RenderableType:
        grid = Table.grid(expand=True)
        grid.add_column(ratio=1)
        grid.add_column(ratio=1)
        panels = [self._panel(i) for i in range(len(self._titles))]
        for i in range(0, len(panels), 2):
            grid.add_row(*panels[i : i + 2])
        return Group(Text(self._heading, style="bold"), grid)

    def _panel(self, index: int) -> Panel:
        wrapped = Text(self._texts[index]).wrap(self._console, max(1, self._console.width // 2 - PANEL_FRAME_CHARS))
        content = Text("\n").join(wrapped[-self._lines :])
        return Panel(content, title=escape(self._titles[index]), height=self._lines + 2, title_align="left")
