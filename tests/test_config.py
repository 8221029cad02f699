"""Configuration: where values come from, and one clear message for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.config import ConfigError, load_settings, validate_against_model

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAOTOKEN_API_KEY", raising=False)


def write(folder: Path, text: str) -> Path:
    file = folder / "config.toml"
    file.write_text(text)
    return file


def test_the_repositorys_file_loads_as_it_is_and_equals_the_defaults() -> None:
    assert load_settings(REPO / "config.toml") == load_settings(None)


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, "[server]\nport = 1\nhost = 'localhost'\n[prefix_cache]\nchunk_size = 64\n")
    monkeypatch.setenv("KVGATE_SERVER__PORT", "2")
    monkeypatch.setenv("KVGATE_PREFIX_CACHE__TIERING", "gpu, disk")
    settings = load_settings(file, {"server.port": 3, "server.host": None})
    assert (settings.server.port, settings.server.host) == (3, "localhost")
    assert load_settings(file).server.port == 2
    assert settings.prefix_cache.tiering == ["gpu", "disk"]
    assert settings.prefix_cache.chunk_size == 64


def test_variables_are_expanded_and_secrets_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-secret")
    file = write(tmp_path, "[server]\napi_key = '${MY_KEY}'\napi_base = 'https://${HOST_NAME:-a.example}/v1//'\n")
    settings = load_settings(file)
    assert settings.server.api_key == "sk-secret"
    assert settings.server.api_base == "https://a.example/v1"
    assert "sk-secret" not in repr(settings) + str(settings)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[server]\napi_key = '${NOT_SET_ANYWHERE}'", ("api_key", "NOT_SET_ANYWHERE", "export")),
        ("[server]\nprot = 1", ("prot", "port")),
        ("[serber]\nport = 1", ("serber", "server")),
        ("port = 1", ("port", "[port]")),
        ("[server]\nmax_body_mb = 1", ("max_body_mb", "[limits]")),
        ("[server]\ncors_origins = ['app.example']", ("cors_origins", "https://")),
        ("[limits]\nmax_choices = 500", ("max_choices", "128")),
        ("[server]\nport = 'x'", ("[server] port", "integer")),
        ("[server]\nport = 70000", ("[server] port", "65535")),
        ("[server]\nhost = '0.0.0.0'", ("api_key", "127.0.0.1")),
        ("[server]\napi_base = 'ftp://x'", ("api_base", "https://")),
        ("[model]\nname = 5", ("[model] name", "string")),
        ("[model]\ndtype = 'int3'", ("dtype", "bfloat16")),
        ("[model]\ngpu_memory_utilization = 0", ("gpu_memory_utilization", "greater than 0")),
        ("[prefix_cache]\nchunk_size = 0", ("chunk_size", "16")),
        ("[prefix_cache]\nchunk_size = 100", ("chunk_size", "16")),
        ("[prefix_cache]\ntiering = ['cpu', 'gpu']", ("tiering", "fastest first")),
        ("[prefix_cache]\ntiering = ['gpu', 'gpu']", ("tiering", "once")),
        ("[prefix_cache]\ncpu_cache_gb = -1", ("cpu_cache_gb", "0")),
        ("[prefix_cache]\neviction_policy = 'best'", ("eviction_policy", "importance_score")),
        ("[prefix_cache]\nnormalise = 'loud'", ("normalise", "safe")),
        ("[logging]\nlevel = 'shout'", ("level", "debug")),
        ("[server\nport = 1", ("TOML", "line 1")),
    ],
)
def test_a_mistake_is_one_message_with_file_key_and_remedy(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_settings(file)
    message = str(caught.value)
    assert str(file) in message
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("name", ["KVGATE_PORT", "KVGATE_SERVER__PROT", "KVGATE_NOTHING__AT_ALL"])
def test_an_unknown_variable_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=name):
        load_settings(None)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_settings(tmp_path / "none.toml")


def test_what_only_the_model_can_tell() -> None:
    settings = load_settings(None, {"prefix_cache.probe_heads": 10})
    with pytest.raises(ConfigError, match=r"probe_heads = 10.*9"):
        validate_against_model(settings, model_max_len=8192, num_attention_heads=9)
    settings = load_settings(None, {"model.max_model_len": 9000})
    with pytest.raises(ConfigError, match=r"max_model_len = 9000.*8192"):
        validate_against_model(settings, model_max_len=8192, num_attention_heads=9)
