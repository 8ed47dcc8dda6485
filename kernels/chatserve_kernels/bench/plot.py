"""The measured rows as one SVG: each row's time and its rivals', as multiples of ours. Needs no plotting library."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from chatserve_kernels.bench.tables import Row

ROW_HEIGHT = 18
LABEL_WIDTH = 330
BAR_WIDTH = 620
COLOURS = ("#2a6f97", "#c9ada7", "#9a8c98", "#d9ae61", "#8fb996")


def svg(rows: Iterable[Row], title: str) -> str:
    """Bars of microseconds, scaled within each row to its slowest: ours first, then each rival."""
    bars: list[str] = []
    y = 40
    heading = ""
    for row in rows:
        if row.table != heading:
            heading = row.table
            y += 10
            bars.append(f'<text x="8" y="{y + 12}" font-weight="bold">{escape(heading)}</text>')
            y += ROW_HEIGHT
        times = {"ours": row.us, **row.rivals}
        slowest = max(times.values())
        bars.append(f'<text x="8" y="{y + 12}">{escape(row.work)}</text>')
        for index, (name, us) in enumerate(times.items()):
            width = BAR_WIDTH * us / slowest
            bars.append(
                f'<rect x="{LABEL_WIDTH}" y="{y + 2}" width="{width:.1f}" height="{ROW_HEIGHT - 4}" '
                f'fill="{COLOURS[index % len(COLOURS)]}"/>'
                f'<text x="{LABEL_WIDTH + width + 4:.1f}" y="{y + 12}">{escape(name)} {us:.4g} us</text>'
            )
            y += ROW_HEIGHT
    width = LABEL_WIDTH + BAR_WIDTH + 180
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y + 20}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n'
        f'<text x="8" y="24" font-size="15">{escape(title)}</text>\n' + "\n".join(bars) + "\n</svg>\n"
    )
