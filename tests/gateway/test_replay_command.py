"""``kvgate replay`` as a user runs it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.cli import app
from gateway.replay import Row
from kvstore.replay import Outcome
from kvstore.tiers.base import TierName
from tests.kvstore.traces import conversations, write


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(conversations(1, 200), tmp_path / "mine.jsonl")


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    return result.exit_code, result.output


def test_the_table_has_a_row_for_each_policy_and_capacity(trace: Path, tmp_path: Path) -> None:
    code, output = run(trace, "--policy", "s3fifo", "--policy", "lru", "--capacity", "10", "--csv", tmp_path / "t.csv")
    assert code == 0
    assert "200 requests" in output and "us/chunk" in output and "blocks of 16 tokens" in output
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == ["lru", "s3fifo"]
    assert all(0 < float(row["hit_rate"]) <= float(row["bound"]) for row in rows)
    assert float(rows[0]["closed"]) == 0


def test_tiers_are_given_with_slashes(trace: Path) -> None:
    code, output = run(trace, "--policy", "lru", "--capacity", "20b/20b/40%")
    assert code == 0 and "20b/20b/40%" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "best"], "there is no policy 'best'"),
        (["--capacity", "many"], "--capacity many: write %"),
        (["--capacity", "nan"], "write %"),
        (["--capacity", "0"], "no block"),
        (["--capacity", "1/2/3/4"], "at most three"),
        (["--capacity", "10", "--policy", "lru", "--csv", "/nonexistent/a.csv"], "can't be written"),
    ],
)
def test_a_mistake_is_one_clear_line(trace: Path, arguments: list[str], words: str) -> None:
    code, output = run(trace, *arguments)
    assert code == 2 and words in output and "Traceback" not in output


def test_a_trace_that_is_not_there_is_said(tmp_path: Path) -> None:
    code, output = run(tmp_path / "none.jsonl")
    assert code == 2 and "none.jsonl" in output and "give a JSONL trace" in output.replace("\n", " ")


def test_the_plot_is_drawn_or_its_extra_named(trace: Path, tmp_path: Path) -> None:
    code, output = run(trace, "--policy", "lru", "--capacity", "10", "--plot", tmp_path / "hits.png")
    if (tmp_path / "hits.png").exists():
        assert code == 0
    else:
        assert code == 2 and "kvgate[plot]" in output


def test_closed_needs_lru_and_a_distance() -> None:
    outcome = Outcome("lfu", 100, {TierName.GPU: 30})
    assert Row("t", "1", 1, outcome, 0.4, None).closed is None
    assert Row("t", "1", 1, outcome, 0.4, 0.4).closed is None
    assert Row("t", "1", 1, outcome, 0.4, 0.2).closed == pytest.approx(0.5)
