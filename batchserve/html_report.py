"""Writes a report as one HTML file that loads nothing: texts, tables and plots, light or dark as the system is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from batchserve.svg_plot import NUM_COLOURS, Plot

LIGHT = ("#1f6fd0", "#d9590b", "#12805c", "#8a4fc4", "#b0305a", "#6b6f76")
DARK = ("#6cb0ff", "#ff9d5c", "#4fd0a2", "#c79bff", "#ff8fb3", "#a9adb5")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts. Columns after the first num_texts hold numbers. bold: the row that stands out."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_texts: int = 1
    bold: int | None = None


@dataclass(slots=True)
class Report:
    """A page that is put together from top to bottom."""

    title: str
    _parts: list[str] = field(default_factory=list)

    def heading(self, text: str) -> None:
        self._parts.append(f"<h2>{escape(text)}</h2>")

    def text(self, text: str) -> None:
        self._parts.append(f"<p>{escape(text)}</p>")

    def code(self, text: str) -> None:
        self._parts.append(f"<pre>{escape(text)}</pre>")

    def facts(self, facts: Sequence[tuple[str, object]]) -> None:
        """Adds names with their values."""
        pairs = (f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts)
        self._parts.append(f"<dl>{''.join(pairs)}</dl>")

    def plot(self, plot: Plot) -> None:
        self._parts.append(f"<figure>{plot.svg()}</figure>")

    def table(self, table: Table) -> None:
        head = "".join(f"<th{_kind(i, table.num_texts)}>{escape(name)}</th>" for i, name in enumerate(table.columns))
        self._parts.append(f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>')
        for number, row in enumerate(table.rows):
            cells = "".join(f"<td{_kind(i, table.num_texts)}>{escape(cell)}</td>" for i, cell in enumerate(row))
            kind = ' class="bold"' if number == table.bold else ""
            self._parts.append(f"<tr{kind}>{cells}</tr>")
        self._parts.append("</tbody></table></div>")

    def html(self) -> str:
        """Returns the page."""
        head = (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"/>'
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
            f"<title>{escape(self.title)}</title><style>{_style()}</style></head>"
        )
        return "\n".join([head, f"<body><h1>{escape(self.title)}</h1>", *self._parts, "</body></html>", ""])


def _kind(column: int, num_texts: int) -> str:
    return "" if column < num_texts else ' class="number"'


def _style() -> str:
    def colours(palette: Sequence[str]) -> str:
        return "".join(f"--c{i}:{colour};" for i, colour in enumerate(palette))

    series = "".join(
        f"line.c{i},polyline.c{i}{{stroke:var(--c{i})}}circle.c{i}{{fill:var(--c{i});stroke:var(--c{i})}}"
        for i in range(NUM_COLOURS)
    )
    dark = f"--text:#e6e7ea;--dim:#9ea3ab;--grid:#33373e;--page:#16181c;--card:#1d2025;{colours(DARK)}"
    light = f"--text:#1c1e21;--dim:#5f646c;--grid:#e3e5e8;--page:#f6f7f8;--card:#fff;{colours(LIGHT)}"
    return (
        f":root{{color-scheme:light dark;{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        + _RULES
        + series
        + RING
    )


RING = "circle.ring{fill:none;stroke-width:2.5}"  # after the rule that fills circles
_RULES = """
body{margin:2rem auto;max-width:64rem;padding:0 1rem;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem}h2{font-size:1.15rem;margin-top:2.2rem}
figure{margin:1rem 0;padding:.8rem;background:var(--card);border:1px solid var(--grid);border-radius:8px}
svg{display:block;width:100%;height:auto}svg text{fill:var(--dim);font:12.5px system-ui,sans-serif}
line,polyline{fill:none;stroke-width:2}.grid{stroke:var(--grid);stroke-width:1}.axis{stroke:var(--dim);stroke-width:1}
.mark{stroke:var(--dim);stroke-width:1.5;stroke-dasharray:2 4}.dashed{stroke-dasharray:7 5}.faint{opacity:.45}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem}dt{color:var(--dim)}dd{margin:0}
pre{padding:.8rem;background:var(--card);border:1px solid var(--grid);border-radius:8px;white-space:pre-wrap;
overflow-wrap:anywhere}
.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.86rem;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .45rem;border-bottom:1px solid var(--grid);text-align:left;vertical-align:top}
td{white-space:nowrap}th{color:var(--dim);font-weight:600}.number{text-align:right}.bold{font-weight:700}
"""
