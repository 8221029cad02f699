"""``kvgate ask`` and ``kvgate serve`` as commands, against a real server."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .server import KVGATE, ServerProcess, free_port
from .texts import document

REPO = Path(__file__).resolve().parents[2]


def kvgate(folder: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("TAOTOKEN_API_KEY", "MY_KEY")}
    return subprocess.run(
        [KVGATE, *args], cwd=folder, capture_output=True, text=True, timeout=120, env={**clean, **env}, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example settings and prompt of this repository, as a user copies them."""
    shutil.copy(REPO / "settings.example.json", tmp_path / "settings.json")
    shutil.copytree(REPO / "prompts", tmp_path / "prompts")
    return tmp_path


def change(folder: Path, **values: Any) -> None:
    """Set keys of settings.json; a double underscore goes into a section."""
    file = folder / "settings.json"
    settings = json.loads(file.read_text())
    for name, value in values.items():
        *sections, key = name.split("__")
        place = settings
        for section in sections:
            place = place[section]
        place[key] = value
    file.write_text(json.dumps(settings))


def hit(ended: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    assert ended.returncode == 0, ended.stderr
    found = re.search(r"hit tokens (\d+)/(\d+), (TTFT|answer after) \d+ ms", ended.stderr)
    assert found, ended.stderr
    return int(found[1]), int(found[2])


def test_the_second_question_reuses_the_shared_prefix(server: ServerProcess, folder: Path) -> None:
    change(folder, api_base=f"{server.root}/v1/", request__temperature=0, request__max_tokens=6)
    prefix = (folder / "prompts" / "system_prefix.txt").read_text()
    first = kvgate(folder, "ask", "What do you do?")
    cached, prompt = hit(first)
    assert "[cut] at request.max_tokens = 6" in first.stderr
    assert first.stdout.strip() and prefix[:40] not in first.stdout
    assert re.search(r"\[memory\] .*process \d+ MiB", first.stderr)
    cached, prompt = hit(kvgate(folder, "ask", "Whom do you serve?"))
    assert cached > prompt - 40, "all of the prefix"
    cached, shorter = hit(kvgate(folder, "ask", "Whom do you serve?", "--no-prefix", "--no-stream"))
    assert shorter < prompt - 100


def test_without_reuse_across_requests_nothing_is_shared(server: ServerProcess, folder: Path) -> None:
    change(folder, api_base=server.root, prefix_cache__reuse_across_requests=False, request__max_tokens=6)
    hit(kvgate(folder, "ask", "Hello?"))
    assert hit(kvgate(folder, "ask", "Hello?"))[0] == 0


def test_a_prefix_over_the_limit_is_refused_with_the_numbers(server: ServerProcess, folder: Path) -> None:
    (folder / "prompts" / "system_prefix.txt").write_text(document(77, 40))
    change(folder, api_base=server.url, prefix_cache__max_prefix_tokens=500)
    ended = kvgate(folder, "ask", "Hello?")
    assert ended.returncode == 2 and ended.stdout == ""
    numbers = [int(n) for n in re.findall(r"\d+", ended.stderr)]
    assert 500 in numbers and any(n > 500 for n in numbers)
    assert "max_prefix_tokens" in ended.stderr and "shorten" in ended.stderr


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"api_bas": "x"}, ("api_bas", "api_base")),
        ({"request__stream": "yes"}, ("request.stream", "boolean")),
        ({"request__top_p": 7}, ("request.top_p", "less than or equal to 1")),
        ({"prefix_cache__shared_prefix_file": "nowhere.txt"}, ("shared_prefix_file", "nowhere.txt", "fix the path")),
    ],
)
def test_wrong_settings_are_one_sentence(folder: Path, settings: dict[str, Any], words: tuple[str, ...]) -> None:
    change(folder, **settings)
    ended = kvgate(folder, "ask", "Hello?")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    for word in words:
        assert word in ended.stderr


def test_missing_and_broken_settings_say_what_to_do(tmp_path: Path) -> None:
    ended = kvgate(tmp_path, "ask", "Hello?")
    assert ended.returncode == 2 and "settings.example.json" in ended.stderr
    (tmp_path / "settings.json").write_text("{")
    ended = kvgate(tmp_path, "ask", "Hello?")
    assert ended.returncode == 2 and "not valid JSON" in ended.stderr


def test_no_server_wrong_model_and_wrong_key_say_what_to_do(server: ServerProcess, folder: Path) -> None:
    change(folder, api_base=f"http://127.0.0.1:{free_port()}")
    ended = kvgate(folder, "ask", "Hello?")
    assert ended.returncode == 1 and "make run" in ended.stderr and "Traceback" not in ended.stderr
    change(folder, api_base=server.url, prefix_cache__enabled=False)
    ended = kvgate(folder, "ask", "Hello?", "--model", "nobody")
    assert ended.returncode == 1 and "'nobody'" in ended.stderr and "default_model" in ended.stderr


def test_the_key_comes_from_the_named_variable(folder: Path) -> None:
    config = folder / "config.toml"
    config.write_text(f'[server]\napi_key = "${{MY_KEY}}"\n[prefix_cache]\ndisk_cache_dir = "{folder}/store"\n')
    with ServerProcess(config, "sk-mine", {"MY_KEY": "sk-mine"}) as keyed:
        change(folder, api_base=keyed.url, api_key_env="MY_KEY", prefix_cache__enabled=False, request__max_tokens=6)
        ended = kvgate(folder, "ask", "Hello?", MY_KEY="sk-other")
        assert ended.returncode == 1 and "401" in ended.stderr and "export MY_KEY=" in ended.stderr
        assert "sk-other" not in ended.stderr + ended.stdout
        hit(kvgate(folder, "ask", "Hello?", MY_KEY="sk-mine"))


def test_version_and_help_are_there_without_a_config(tmp_path: Path) -> None:
    assert re.match(r"kvgate \d+\.\d+", kvgate(tmp_path, "--version").stdout)
    assert "serve" in kvgate(tmp_path, "--help").stdout


def test_a_taken_port_is_said_at_once(server: ServerProcess, tmp_path: Path) -> None:
    ended = kvgate(tmp_path, "serve", "--port", str(server.port))
    assert ended.returncode == 2
    assert str(server.port) in ended.stderr and "--port" in ended.stderr and "Traceback" not in ended.stderr
