"""Keys, refusals at start, and forwarding to a second server process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from .server import KVGATE, ServerProcess, write_config
from .texts import chat, document

KEY = "sk-test-unified-key-0123456789"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    """A gateway on one model name in front of a second server of ours with another; one key for both."""
    folder = tmp_path_factory.mktemp("upstream")
    alias = folder / "upstream-model"
    import torch

    from gateway.engine.sources import resolve_source

    alias.symlink_to(resolve_source("demo", torch.float32), target_is_directory=True)
    env = {"TAOTOKEN_API_KEY": KEY}
    shared = {"api_key": "${TAOTOKEN_API_KEY}"}
    behind = write_config(folder, server=shared, model={"name": str(alias), "dtype": "float32"})
    with ServerProcess(behind, KEY, env) as upstream:
        front = tmp_path_factory.mktemp("front")
        config = write_config(front, server={**shared, "api_base": f"{upstream.root}/v1/"},
                              prefix_cache={"namespace": "per_key"})  # fmt: skip
        with ServerProcess(config, KEY, env) as gateway:
            yield gateway, upstream


def test_a_request_without_the_key_is_401_with_a_remedy(pair: tuple[ServerProcess, ServerProcess]) -> None:
    gateway, _ = pair
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": f"Basic {KEY}"}, {"x-api-key": "x"}):
        response = httpx.post(f"{gateway.url}/chat/completions", headers=headers, content=b"not even json")
        assert response.status_code == 401
        assert "api_key" in response.json()["error"]["message"]
        assert response.headers["www-authenticate"].startswith("Bearer")
    assert httpx.get(f"{gateway.url}/models", params={"api_key": KEY}).status_code == 401
    for headers in ({"authorization": f"bearer {KEY}"}, {"x-api-key": KEY}):
        assert httpx.get(f"{gateway.url}/models", headers=headers).status_code == 200


def test_other_models_are_forwarded_and_listed(pair: tuple[ServerProcess, ServerProcess]) -> None:
    gateway, upstream = pair
    remote = upstream.client.models.list().data[0].id
    assert [m.id for m in gateway.client.models.list().data] == ["demo", remote]
    direct = upstream.client.chat.completions.create(
        model=remote, messages=chat("Be brief.", "Name a colour."), max_tokens=8, temperature=0
    )
    through = gateway.client.chat.completions.create(
        model=remote, messages=chat("Be brief.", "Name a colour."), max_tokens=8, temperature=0
    )
    assert through.choices[0].message.content == direct.choices[0].message.content
    assert through.usage is not None and through.usage.prompt_tokens_details is not None
    stream = gateway.client.chat.completions.create(
        model=remote, messages=chat("Be brief.", "Name a colour."), max_tokens=8, temperature=0, stream=True
    )
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text == direct.choices[0].message.content


def test_upstream_errors_keep_status_and_envelope(pair: tuple[ServerProcess, ServerProcess]) -> None:
    gateway, upstream = pair
    remote = upstream.client.models.list().data[0].id
    with pytest.raises(openai.BadRequestError) as bad:
        gateway.client.chat.completions.create(model=remote, messages=chat("a", "b"), max_tokens=-1)
    assert bad.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as long:
        gateway.client.chat.completions.create(model=remote, messages=chat(document(1, 150), "b"))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError) as missing:
        gateway.client.chat.completions.create(model="nobody-has-this", messages=chat("a", "b"))
    assert missing.value.code == "model_not_found"


def test_the_key_is_nowhere_to_be_read(pair: tuple[ServerProcess, ServerProcess]) -> None:
    gateway, upstream = pair
    httpx.get(f"{gateway.url}/models?api_key={KEY}")
    metrics = httpx.get(f"{gateway.root}/metrics", headers={"authorization": f"Bearer {KEY}"}).text
    for text in (gateway.log, upstream.log, metrics):
        assert KEY not in text


def serve(config: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [KVGATE, "serve", "--config", str(config)], capture_output=True, text=True, timeout=60,
        env={k: v for k, v in {**os.environ, **env}.items() if k != "TAOTOKEN_API_KEY"}, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"server": {"host": "0.0.0.0"}}, ("[server]", "api_key", "127.0.0.1")),
        ({"server": {"api_key": "${TAOTOKEN_API_KEY}"}}, ("TAOTOKEN_API_KEY", "api_key")),
        ({"prefix_cache": {"chunk_size": 0}}, ("chunk_size", "prefix_cache")),
        ({"model": {"max_model_len": 100_000}}, ("max_model_len", "8192")),
        ({"model": {"name": "/no/such/model"}}, ("[model]", "/no/such/model")),
        ({"prefix_cache": {"device_cache_gb": 0.01}}, ("device_cache_gb", "max_model_len")),
    ],
)
def test_a_bad_config_is_one_message_and_exit_2(
    tmp_path: Path, sections: dict[str, dict[str, object]], words: tuple[str, ...]
) -> None:
    ended = serve(write_config(tmp_path, **sections))
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    for word in words:
        assert word in ended.stderr


def test_two_servers_on_one_store_folder_refuse(server: ServerProcess, tmp_path: Path) -> None:
    shared = server.config.parent / "store"
    ended = serve(write_config(tmp_path, prefix_cache={"disk_cache_dir": str(shared)}))
    assert ended.returncode == 2
    assert "disk_cache_dir" in ended.stderr and "Traceback" not in ended.stderr
