"""config.toml, ``${ENV}`` and ``KVGATE_*`` → one frozen settings tree, or one clear message.

Precedence: flags, then ``KVGATE_SECTION__KEY`` variables, then the file, then the defaults.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

ENV_PREFIX = "KVGATE_"

#: Variables with the prefix that are no settings.
OTHER_VARIABLES = {"KVGATE_CACHE_DIR"}

_REFERENCE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_TIERS = ("gpu", "cpu", "disk")

#: Keys that come comma-separated from the environment.
_LISTS = {("prefix_cache", "tiering"), ("server", "cors_origins")}


class ConfigError(Exception):
    """One sentence for the user: where, what, and what to do."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


Size = Annotated[float, Field(ge=0, strict=False)]


class ServerSettings(_Section):
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, strict=False)] = 8000
    api_base: str = ""
    key: Annotated[SecretStr, Field(alias="api_key")] = SecretStr("")
    cors_origins: list[str] = []
    ping_seconds: Annotated[float, Field(gt=0, strict=False)] = 10
    shutdown_seconds: Annotated[float, Field(ge=0, strict=False)] = 10

    @property
    def api_key(self) -> str:
        """The unified key; empty when none is set. Kept out of repr."""
        return self.key.get_secret_value().strip()

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: list[str]) -> list[str]:
        for origin in value:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/]+", origin):
                raise ValueError(f'{origin!r} is no origin: write "https://app.example" without a path, or "*"')
        return value

    @field_validator("api_base")
    @classmethod
    def _check_base(cls, value: str) -> str:
        value = value.strip().rstrip("/")
        if value and not re.match(r"https?://[^/]+", value):
            raise ValueError('must start with http:// or https://, for example "https://host/v1"')
        return value

    @model_validator(mode="after")
    def _check_open(self) -> ServerSettings:
        if not self.api_key and not _is_loopback(self.host):
            raise ValueError(
                f'without api_key only this machine may connect, and host is "{self.host}": set api_key, or '
                'host = "127.0.0.1"'
            )
        return self


class LimitSettings(_Section):
    """What one request, and all that wait, may ask for. The answer beyond each is in config.toml."""

    max_body_mb: Annotated[float, Field(gt=0, strict=False)] = 32
    max_json_depth: Annotated[int, Field(ge=8, le=500, strict=False)] = 100
    max_messages: Annotated[int, Field(ge=1, strict=False)] = 4096
    max_choices: Annotated[int, Field(ge=1, le=128, strict=False)] = 128
    max_waiting: Annotated[int, Field(ge=1, strict=False)] = 256
    max_wait_seconds: Annotated[float, Field(gt=0, strict=False)] = 300
    max_responses: Annotated[int, Field(ge=0, strict=False)] = 1000
    responses_mb: Annotated[float, Field(ge=0, strict=False)] = 64
    response_seconds: Annotated[float, Field(gt=0, strict=False)] = 3600

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mb * 2**20)


class ModelSettings(_Section):
    name: Annotated[str, Field(min_length=1)] = "demo"
    max_model_len: Annotated[int, Field(ge=0, strict=False)] = 0
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1, strict=False)] = 0.85
    tool_parser: Literal["auto", "hermes", "llama3", "mistral", "json"] = "auto"
    reasoning_parser: Literal["auto", "think", "off"] = "auto"


class PrefixCacheSettings(_Section):
    enable: Annotated[bool, Field(strict=False)] = True
    tiering: list[Literal["gpu", "cpu", "disk"]] = ["gpu", "cpu", "disk"]
    device_cache_gb: Size = 1.0
    cpu_cache_gb: Size = 2.0
    disk_cache_gb: Size = 10.0
    disk_cache_dir: Annotated[str, Field(min_length=1)] = "~/.cache/kvgate/prefix"
    eviction_policy: str = "importance_score"
    chunk_size: Annotated[int, Field(ge=16, le=4096, multiple_of=16, strict=False)] = 256
    probe_heads: Annotated[int, Field(ge=0, strict=False)] = 3
    normalise: Literal["off", "safe", "nfc+space"] = "safe"
    namespace: Literal["shared", "per_key"] = "shared"
    durable: Annotated[bool, Field(strict=False)] = False

    @field_validator("tiering")
    @classmethod
    def _check_tiers(cls, value: list[str]) -> list[str]:
        if not value or value[0] != "gpu" or value != [tier for tier in _TIERS if tier in value]:
            raise ValueError('name each tier once, fastest first, from "gpu", "cpu", "disk", beginning with "gpu"')
        return value

    @field_validator("eviction_policy")
    @classmethod
    def _check_policy(cls, value: str) -> str:
        from kvstore.policy import POLICIES  # brings torch: `kvgate ask` and `--version` start without it

        if value not in POLICIES:
            raise ValueError(f"there is no policy {value!r}; choose one of {', '.join(POLICIES)}")
        return value


class EngineSettings(_Section):
    max_batch_size: Annotated[int, Field(ge=1, le=1024, strict=False)] = 16
    prefill_tokens_per_step: Annotated[int, Field(ge=0, strict=False)] = 0
    deterministic: Annotated[bool, Field(strict=False)] = False
    shadow_verify: Annotated[float, Field(ge=0, le=1, strict=False)] = 0.0
    speculation: Annotated[bool, Field(strict=False)] = True


class LoggingSettings(_Section):
    level: Literal["debug", "info", "warning", "error"] = "info"
    log_prefix_hit: Annotated[bool, Field(strict=False)] = True


class TraceSettings(_Section):
    record: str = ""
    max_mb: Annotated[float, Field(gt=0, strict=False)] = 256


class Settings(BaseSettings):
    """All settings; frozen. Built by ``load_settings``."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix=ENV_PREFIX, env_nested_delimiter="__", env_ignore_empty=False
    )

    server: ServerSettings = Field(default_factory=ServerSettings)
    limits: LimitSettings = Field(default_factory=LimitSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    prefix_cache: PrefixCacheSettings = Field(default_factory=PrefixCacheSettings)
    engine: EngineSettings = Field(default_factory=EngineSettings)
    logging: LoggingSettings = Field(default_factory=LoggingSettings)
    trace: TraceSettings = Field(default_factory=TraceSettings)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        # load_settings merges flags, environment and file itself, so that each error can name its origin.
        return (init_settings,)


def load_settings(path: Path | None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Read and check the configuration.

    Args:
        path: the TOML file; None = defaults and environment only.
        overrides: flags, as ``{"server.port": 9000}``; None values are left out.

    Raises:
        ConfigError: anything wrong, as one message with file, key and remedy.
    """
    origins: dict[str, str] = {}
    merged: dict[str, Any] = {}
    file = str(path) if path else "the built-in defaults"
    for section, keys in _read_file(path).items():
        if not isinstance(keys, dict):
            raise ConfigError(f"{file}: {section!r} must be a section: write [{section}] and its keys below it")
        for key, value in keys.items():
            _put(merged, origins, section, key, _expand(value, f"{file}: [{section}] {key}"), file)
    for section, key, text, name in _environment():
        _put(merged, origins, section, key, _from_text(section, key, text), name)
    for dotted, value in (overrides or {}).items():
        if value is not None:
            section, key = dotted.split(".")
            _put(merged, origins, section, key, value, f"--{key.replace('_', '-')}")
    try:
        return Settings(**merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins, file)) from None


def validate_against_model(settings: Settings, *, model_max_len: int, num_attention_heads: int) -> None:
    """Check what only the loaded model can tell.

    Raises:
        ConfigError: more probe heads than heads, or a longer context than the model has.
    """
    heads = settings.prefix_cache.probe_heads
    if heads > num_attention_heads:
        raise ConfigError(
            f"[prefix_cache] probe_heads = {heads}, but model {settings.model.name!r} has {num_attention_heads} query "
            f"heads a layer; set it to {num_attention_heads} or less"
        )
    length = settings.model.max_model_len
    if length > model_max_len:
        raise ConfigError(
            f"[model] max_model_len = {length}, but model {settings.model.name!r} takes {model_max_len} tokens; set it "
            f"to {model_max_len} or less (0 = the model's own limit)"
        )


def _read_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give an existing one with --config") from None
    except OSError as error:
        raise ConfigError(f"{path}: can't be read ({error.strerror}); check its permissions") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}; strings need quotes, keys need a [section]") from None


def _expand(value: Any, place: str) -> Any:
    if isinstance(value, list):
        return [_expand(item, place) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match.groups()
        if name in os.environ:
            return os.environ[name]
        if default is None:
            raise ConfigError(
                f"{place}: the environment variable {name} is not set; export it, or write ${{{name}:-default}}"
            )
        return default

    return _REFERENCE.sub(replace, value)


def _environment() -> list[tuple[str, str, str, str]]:
    found = []
    for name, text in os.environ.items():
        if not name.startswith(ENV_PREFIX) or name in OTHER_VARIABLES:
            continue
        section, separator, key = name.removeprefix(ENV_PREFIX).lower().partition("__")
        if not separator:
            raise ConfigError(
                f"environment variable {name}: write KVGATE_SECTION__KEY with two underscores, for example "
                "KVGATE_SERVER__PORT"
            )
        found.append((section, key, text, name))
    return found


def _from_text(section: str, key: str, text: str) -> Any:
    """Lists come comma-separated from the environment; the rest is converted by the field's type."""
    return [part.strip() for part in text.split(",") if part.strip()] if (section, key) in _LISTS else text


def _put(merged: dict[str, Any], origins: dict[str, str], section: str, key: str, value: Any, origin: str) -> None:
    sections = {name: field.annotation for name, field in Settings.model_fields.items()}
    if section not in sections:
        raise ConfigError(f"{origin}: there is no section [{section}]{nearest(section, sections)}")
    model = sections[section]
    assert isinstance(model, type)
    assert issubclass(model, BaseModel)
    keys = [field.alias or name for name, field in model.model_fields.items()]
    if key not in keys:
        elsewhere = [name for name, other in sections.items() if key in getattr(other, "model_fields", {})]
        hint = f"; it belongs to [{elsewhere[0]}]" if elsewhere else nearest(key, keys)
        raise ConfigError(f"{origin}: [{section}] has no key {key!r}{hint}")
    merged.setdefault(section, {})[key] = value
    origins[f"{section}.{key}"] = origin


def nearest(word: str, known: Any) -> str:
    """The end of an error about a name that isn't known: the likeliest meant, or all there are."""
    close = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def _explain(error: ValidationError, origins: dict[str, str], file: str) -> str:
    first = error.errors(include_url=False)[0]
    location = [str(part) for part in first["loc"]]
    section, key = location[0], location[1] if len(location) > 1 else ""
    origin = origins.get(f"{section}.{key}") or next(
        (o for name, o in origins.items() if name.startswith(f"{section}.")), file
    )
    message = first["msg"].removeprefix("Value error, ")
    place = f"{origin}: [{section}] {key}".rstrip()
    if not key or key == "api_key":
        return f"{place}: {message}"
    return f"{place} = {first['input']!r}: {message[0].lower()}{message[1:]}"


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
