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


@pytest.fixture
def server(tokenizer: Any) -> Iterator[Running]:
    """A server with defaults: no key, no upstream."""
    with serving(tokenizer) as running:
        yield running
