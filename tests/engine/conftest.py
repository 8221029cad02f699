from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from gateway.engine.sources import resolve_source


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model, unpacked in float32 (made once a machine)."""
    return Path(resolve_source("demo", torch.float32))


@pytest.fixture(scope="session")
def demo_tokenizer(demo_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_folder)
