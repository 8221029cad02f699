"""Links between the pages, and paths they name, are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
PAGES = [REPO / "README.md", REPO / "README.zh-CN.md", *sorted((REPO / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_both_readmes_show_both_commands_and_name_every_key() -> None:
    keys = re.findall(r"^(\w+) = ", (REPO / "config.toml").read_text(), re.M)
    for page in PAGES[:2]:
        text = page.read_text()
        assert "make run" in text
        assert "make test" in text
        assert [key for key in keys if not re.search(rf"\b{key}\b", text)] == []


def test_every_test_that_a_page_names_exists() -> None:
    there = set(
        re.findall(
            r"^(?:async )?def (test_\w+)", "\n".join(p.read_text() for p in REPO.rglob("tests/**/test_*.py")), re.M
        )
    )
    for page in PAGES:
        named = set(re.findall(r"`(test_\w+)`", page.read_text()))
        assert named <= there, f"{page.name} names tests that are gone: {sorted(named - there)}"
