"""The container files as far as they can be checked without an engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gateway.config import ConfigError, load_settings

REPO = Path(__file__).resolve().parent.parent
DOCKER = REPO / "docker"


def test_every_copied_path_is_in_the_repository() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.M) for word in line.split()[:-1]]
    assert copied
    ignored = (REPO / ".dockerignore").read_text().split()
    for path in copied:
        assert (REPO / path).exists(), path
        assert path.split("/")[0] not in ignored
    assert re.search(r"^USER (?!root)", text, re.M)


def test_compose_names_files_that_exist_and_scrapes_the_right_port() -> None:
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    build = compose["services"]["kvgate"]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
    mounted = compose["services"]["prometheus"]["volumes"][0].split(":")[0]
    scrape = yaml.safe_load((DOCKER / mounted).read_text())["scrape_configs"][0]
    assert scrape["static_configs"][0]["targets"] == ["kvgate:8000"]
    secret = Path(scrape["authorization"]["credentials_file"]).name
    assert secret in compose["services"]["prometheus"]["secrets"]
    assert secret in compose["secrets"]


def test_the_containers_config_needs_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAOTOKEN_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="TAOTOKEN_API_KEY"):
        load_settings(DOCKER / "config.toml")
    monkeypatch.setenv("TAOTOKEN_API_KEY", "sk-container")
    settings = load_settings(DOCKER / "config.toml")
    assert settings.server.api_key == "sk-container"
    assert "sk-container" not in repr(settings)
