"""settings.json: the client's side of kvgate, strict, with errors that say what to do."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gateway.config import nearest


class SettingsError(Exception):
    """One sentence: file, key and remedy."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PrefixSettings(_Part):
    enabled: bool = True
    shared_prefix_file: str = ""
    reuse_across_requests: bool = True
    max_prefix_tokens: Annotated[int, Field(ge=1)] = 4096


class RequestSettings(_Part):
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.7
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 512
    stream: bool = True
    timeout_seconds: Annotated[float, Field(gt=0)] = 120


class ObservabilitySettings(_Part):
    log_cache_hit: bool = True
    log_gpu_mem: bool = True


class ClientSettings(_Part):
    api_base: str = "http://127.0.0.1:8000/v1"
    api_key_env: str = "TAOTOKEN_API_KEY"
    default_model: str = "demo"
    prefix_cache: PrefixSettings = PrefixSettings()
    request: RequestSettings = RequestSettings()
    observability: ObservabilitySettings = ObservabilitySettings()

    @property
    def base_url(self) -> str:
        """The server's /v1 address; given with or without ``/v1`` and trailing slashes."""
        base = self.api_base.rstrip("/")
        return base if base.endswith("/v1") else f"{base}/v1"

    @property
    def api_key(self) -> str:
        return os.environ.get(self.api_key_env, "").strip()


def load_client_settings(path: Path) -> ClientSettings:
    """Read settings.json.

    Raises:
        SettingsError: anything wrong, as one sentence.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SettingsError(
            f"{path}: no such file; copy settings.example.json to {path}, or name another file with --settings"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: can't be read ({error}); check the file") from None
    try:
        return ClientSettings.model_validate_json(text)
    except ValidationError as error:
        raise SettingsError(f"{path}: {_explain(error)}") from None


def prefix_path(settings: ClientSettings, settings_file: Path) -> Path:
    """The shared prefix file; a relative path counts from the settings file's folder."""
    path = Path(settings.prefix_cache.shared_prefix_file).expanduser()
    return path if path.is_absolute() else settings_file.resolve().parent / path


def _explain(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"there is no key {key!r}{_suggest(first['loc'])}; remove it"
    if first["type"] == "json_invalid":
        return f"not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}; fix it there"
    return f"{key} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"


def _suggest(location: tuple[int | str, ...]) -> str:
    model: type[BaseModel] = ClientSettings
    for part in location[:-1]:
        inner = model.model_fields[str(part)].annotation
        assert isinstance(inner, type) and issubclass(inner, BaseModel)
        model = inner
    return nearest(str(location[-1]), list(model.model_fields))
