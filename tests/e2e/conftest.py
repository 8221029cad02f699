from __future__ import annotations

from collections.abc import Iterator

import pytest

from .server import ServerProcess, write_config


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that don't need their own; no key, three tiers."""
    with ServerProcess(write_config(tmp_path_factory.mktemp("shared-server"))) as running:
        yield running
