from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from gateway.engine.sources import resolve_source

from .scripted import Running, serving


@pytest.fixture(scope="session")
def tokenizer_folder() -> Path:
    """The demo model's folder (unpacked once a machine)."""
    return Path(resolve_source("demo", torch.float32))


@pytest.fixture(scope="session")
def tokenizer(tokenizer_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tokenizer_folder)


@pytest.fixture(scope="session")
def shared_server(tokenizer: Any) -> Iterator[Running]:
    with serving(tokenizer) as running:
        yield running


@pytest.fixture
def server(shared_server: Running) -> Running:
    """A server with defaults: no key, no upstream, nothing answered yet (its counters go on counting)."""
    shared_server.engine.follow_no_script()
    return shared_server


@pytest.fixture
def fresh_server(tokenizer: Any) -> Iterator[Running]:
    """A server of the test's own, whose counters begin at zero."""
    with serving(tokenizer) as running:
        yield running
