"""``kvgate ask``: one question to a running server, with the shared prefix in front."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import typer
from prometheus_client.parser import text_string_to_metric_families

from gateway.client_settings import ClientSettings, SettingsError, load_client_settings, prefix_path

_BAD_SETTINGS, _FAILED = 2, 1


class ClientError(Exception):
    """One sentence for the user, and the exit code."""

    def __init__(self, message: str, exit_code: int = _FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class Answer:
    started: float
    first: float | None = None  # when the first text came
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    source: str = ""  # the x-prefix-cache header
    finish_reason: str = ""

    @property
    def cached_tokens(self) -> int:
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def run_ask(question: str, settings_file: Path, *, model: str | None, stream: bool | None, use_prefix: bool) -> None:
    """Ask and print.

    Raises:
        ClientError: settings, connection, key, model or prefix; the message says what to do.
    """
    try:
        settings = load_client_settings(settings_file)
    except SettingsError as error:
        raise ClientError(str(error), _BAD_SETTINGS) from None
    client = Client(settings, model or settings.default_model)
    prefix = _read_prefix(settings, settings_file) if use_prefix and settings.prefix_cache.enabled else ""
    with client:
        if prefix:
            client.check_prefix(prefix)
        streams = settings.request.stream if stream is None else stream
        answer = client.ask(prefix, question, streams)
        if answer.finish_reason == "length":
            typer.echo(f"[cut] at request.max_tokens = {settings.request.max_tokens}, or the context is full", err=True)
        if settings.observability.log_cache_hit:
            prompt = answer.usage.get("prompt_tokens", 0)
            ttft = f"{(answer.first - answer.started) * 1e3:.0f} ms" if answer.first else "none"
            first = "TTFT" if streams else "answer after"
            typer.echo(
                f"[cache] hit tokens {answer.cached_tokens}/{prompt}, {first} {ttft} ({answer.source})", err=True
            )
        if settings.observability.log_gpu_mem:
            typer.echo(f"[memory] {client.memory()}", err=True)


def _read_prefix(settings: ClientSettings, settings_file: Path) -> str:
    if not settings.prefix_cache.shared_prefix_file:
        return ""
    path = prefix_path(settings, settings_file)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClientError(
            f"prefix_cache.shared_prefix_file: {path} can't be read ({error}); fix the path, or set "
            "prefix_cache.enabled to false",
            _BAD_SETTINGS,
        ) from None


class Client:
    """Talks to one server; use it as a context manager."""

    def __init__(self, settings: ClientSettings, model: str) -> None:
        self._settings = settings
        self._model = model
        headers = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._http = httpx.Client(headers=headers, timeout=settings.request.timeout_seconds)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def check_prefix(self, prefix: str) -> None:
        """Refuse a prefix over ``max_prefix_tokens``, with both numbers; never cut it.

        A token is at least one byte, so short prefixes need no count. Longer ones are counted by the server with a
        request for one token, which also puts the prefix into its cache.
        """
        limit = self._settings.prefix_cache.max_prefix_tokens
        if len(prefix.encode()) <= limit:
            return
        body = {"messages": [{"role": "system", "content": prefix}], "max_tokens": 1}
        counted = self._post({**body, **self._common()}).get("usage", {}).get("prompt_tokens", 0)
        if counted > limit:
            raise ClientError(
                f"the shared prefix has {counted} tokens, but prefix_cache.max_prefix_tokens is {limit}; shorten the "
                "prefix or raise the limit",
                _BAD_SETTINGS,
            )

    def ask(self, prefix: str, question: str, stream: bool) -> Answer:
        """Ask; the text goes to standard output as it comes."""
        messages = [{"role": "system", "content": prefix}] if prefix else []
        messages.append({"role": "user", "content": question})
        body: dict[str, Any] = {
            "messages": messages,
            "temperature": self._settings.request.temperature,
            "top_p": self._settings.request.top_p,
            "max_tokens": self._settings.request.max_tokens,
            **self._common(),
        }
        answer = Answer(time.perf_counter())
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            for piece in self._stream(body, answer):
                typer.echo(piece, nl=False)
            typer.echo()
        else:
            reply = self._post(body, answer)
            answer.first = time.perf_counter()
            answer.usage = reply.get("usage") or {}
            answer.text = reply["choices"][0]["message"]["content"] or ""
            answer.finish_reason = reply["choices"][0].get("finish_reason") or ""
            typer.echo(answer.text)
        return answer

    def memory(self) -> str:
        """Device and process memory as the server's /metrics tells it."""
        root = self._settings.base_url.removesuffix("/v1")
        try:
            response = self._http.get(f"{root}/metrics")
            response.raise_for_status()
        except httpx.HTTPError as error:
            return f"not available ({type(error).__name__} at {root}/metrics)"
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                if sample.name == "kvgate_device_memory_bytes":
                    found[f"device {sample.labels.get('kind', '')}"] = sample.value
                elif sample.name == "kvgate_process_resident_memory_bytes":
                    found["process"] = sample.value
        return ", ".join(f"{name} {value / 2**20:.0f} MiB" for name, value in found.items()) or "not exported"

    def _common(self) -> dict[str, Any]:
        common: dict[str, Any] = {"model": self._model}
        if not self._settings.prefix_cache.reuse_across_requests:
            common["cache_salt"] = secrets.token_hex(8)
        return common

    def _post(self, body: dict[str, Any], answer: Answer | None = None) -> dict[str, Any]:
        try:
            response = self._http.post(f"{self._settings.base_url}/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise self._refused(response)
        if answer is not None:
            answer.source = response.headers.get("x-prefix-cache", "")
        reply: dict[str, Any] = response.json()
        return reply

    def _stream(self, body: dict[str, Any], answer: Answer) -> Iterator[str]:
        url = f"{self._settings.base_url}/chat/completions"
        try:
            with self._http.stream("POST", url, json=body) as response:
                if response.status_code != 200:
                    response.read()
                    raise self._refused(response)
                answer.source = response.headers.get("x-prefix-cache", "")
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        yield from self._piece(json.loads(line[6:]), answer)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _piece(self, event: dict[str, Any], answer: Answer) -> Iterator[str]:
        if "error" in event:
            raise ClientError(f"the server ended the answer: {event['error'].get('message')}")
        answer.usage = event.get("usage") or answer.usage
        for choice in event.get("choices") or []:
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if piece := choice.get("delta", {}).get("content"):
                answer.first = answer.first or time.perf_counter()
                answer.text += piece
                yield piece

    def _unreachable(self, error: httpx.HTTPError) -> ClientError:
        if isinstance(error, httpx.TimeoutException):
            return ClientError(
                f"no answer from {self._settings.base_url} in {self._settings.request.timeout_seconds:g} s; raise "
                "request.timeout_seconds, or look at the server's log"
            )
        return ClientError(
            f"can't reach {self._settings.base_url} ({error}); start the server with `make run`, or fix api_base"
        )

    def _refused(self, response: httpx.Response) -> ClientError:
        try:
            said = response.json()["error"]["message"]
        except (ValueError, KeyError, TypeError):
            said = response.text[:200]
        if response.status_code == 401:
            env = self._settings.api_key_env
            return ClientError(f"401: {said} The key is read from the environment variable {env}: export {env}=...")
        if response.status_code == 404:
            return ClientError(f"404: {said} The model asked for was {self._model!r}: see default_model or --model")
        return ClientError(f"{response.status_code}: {said}")
