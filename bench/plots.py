"""Figures of the benches as pictures, one look for all. Needs matplotlib: ``pip install -e '.[plot]'``."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

#: A colour for each server, the same in every picture.
_COLOURS = {"kvgate": "#1b6ca8", "vLLM": "#d1495b", "llama.cpp": "#66a182", "transformers": "#edae49"}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        sys.exit("plots need matplotlib: pip install -e '.[plot]'")
    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"figure.dpi": 110, "font.size": 8, "axes.grid": True, "grid.alpha": 0.3})
    return pyplot


def _save(pyplot: Any, figure: Any, machine: str, path: Path) -> None:
    figure.suptitle(machine, fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def plot_peers(report: str, path: Path) -> None:
    """Bars for each row of ``bench.peers`` (its JSON), a panel for each section and unit."""
    pyplot = _pyplot()
    data = json.loads(report)
    panels: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for row in data["figures"]:
        panel = panels.setdefault((row["section"], row["unit"]), {})
        panel.setdefault(row["name"], {})[row["server"]] = row["median"]
    servers = list(dict.fromkeys(row["server"] for row in data["figures"]))
    rows = sum(len(panel) for panel in panels.values())
    heights = [len(panel) + 0.6 for panel in panels.values()]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(8, 0.3 * rows * len(servers) ** 0.5 + 2), height_ratios=heights, squeeze=False
    )
    for axis, ((_, unit), panel) in zip(axes[:, 0], panels.items(), strict=True):
        width = 0.8 / len(servers)
        for i, server in enumerate(servers):
            values = [panel[name].get(server, 0.0) for name in panel]
            places = [y + i * width for y in range(len(panel))]
            axis.barh(places, values, width, label=server, color=_COLOURS.get(server))
        axis.set_yticks([y + 0.4 - width / 2 for y in range(len(panel))], list(panel))
        axis.invert_yaxis()
        axis.set_xlabel(unit)
    axes[0, 0].legend()
    _save(pyplot, figure, data["machine"], path)


def plot_speculation(figures: Seq[dict[str, Any]], machine: str, path: Path) -> None:
    """Factor with to without, by workload and streams; the line at 0.97 is the most it may cost."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 0.35 * len(figures) + 1.2))
    names = [f"{row['workload']}, {row['streams']} streams" for row in figures]
    axis.barh(names, [row["factor"] for row in figures], color=_COLOURS["kvgate"])
    axis.axvline(1.0, color="black", linewidth=0.8)
    axis.axvline(0.97, color=_COLOURS["vLLM"], linewidth=0.8, linestyle="--")
    axis.invert_yaxis()
    axis.set_xlabel("tokens/s with speculation, to without")
    _save(pyplot, figure, machine, path)


def plot_scale(figures: dict[str, list[dict[str, float]]], machine: str, path: Path) -> None:
    """A column of panels a section; the first key of its rows is the x axis, on a logarithmic scale."""
    pyplot = _pyplot()
    wide = max(len(rows[0]) - 1 for rows in figures.values())
    figure, axes = pyplot.subplots(len(figures), wide, figsize=(2.6 * wide, 2.3 * len(figures)), squeeze=False)
    for line, rows in zip(axes, figures.values(), strict=True):
        x, *names = rows[0]
        for axis, name in zip(line, names, strict=False):
            axis.plot([row[x] for row in rows], [row[name] for row in rows], "o-", color=_COLOURS["kvgate"])
            axis.set(xscale="log", xlabel=x, title=name)
            axis.set_ylim(bottom=0)
        for axis in line[len(names) :]:
            axis.remove()
    _save(pyplot, figure, machine, path)
