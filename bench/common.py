"""Shared by the benchmarks: machine line, server processes on loopback, streaming TTFT measured at the client."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch

from gateway.engine.loader import pick_device, pick_dtype

REPO = Path(__file__).resolve().parent.parent

#: One client for all requests: a new one reads the certificate store first, tens of milliseconds of each time measured.
_CLIENT = httpx.Client(timeout=600)

_TEMPLATES = (
    "The {a} in section {i} of the handbook is kept by the {b} team and reviewed every {n} days.",
    "When a customer reports that the {a} fails with code {n}, ask for the serial number of the {b} first.",
    "Never promise a refund for the {a} before the {b} has been checked against invoice {n}.",
    "Temperatures above {n} degrees make the {a} slower; the {b} then takes over by itself.",
    "Item {i}: the {a} ships with {n} screws, one {b} and a printed sheet in three languages.",
)
_NOUNS = ("pump", "valve", "router", "battery", "sensor", "filter", "panel", "ledger", "bridge", "engine", "cable")


#: Sentences of ``document`` that make so many tokens with SmolLM2's tokenizer.
SENTENCES = {"512": 22, "2k": 90, "4k": 181, "6k": 277, "7k": 315}


def document(seed: int, sentences: int) -> str:
    """Varied English text; other seeds differ from the first sentence on, so nothing of it can be shared."""
    lines = [f"Document number {seed}."]
    for i in range(sentences):
        k = (i * 7919 + seed * 104729) % 1_000_003
        template = _TEMPLATES[k % len(_TEMPLATES)]
        lines.append(template.format(a=_NOUNS[k % 11], b=_NOUNS[(k // 11) % 11], i=i + 1, n=(k // 121) % 97 + 2))
    return " ".join(lines)


def native_dtype() -> torch.dtype:
    """What ``dtype = "auto"`` means on this machine: bfloat16, or float32 where the processor doesn't multiply it."""
    return pick_dtype("auto", pick_device())


def dtype_name() -> str:
    return str(native_dtype()).removeprefix("torch.")


def machine_line() -> str:
    """CPU, cores, memory and commit, for the head of every report."""
    cpu = platform.processor() or "unknown CPU"
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.split(":", 1)[1].strip()
                break
    except OSError:
        pass
    pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=REPO, capture_output=True, text=True, check=False
    ).stdout.strip()
    return f"{cpu}, {os.cpu_count()} cores, {pages * size / 2**30:.0f} GiB; commit {commit or 'unknown'}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True, slots=True)
class Server:
    url: str  # with /v1
    model: str
    pid: int
    extra: dict[str, Any] = field(default_factory=dict)  # put into every request; a None takes a field out


@contextmanager
def running(
    command: list[str],
    port: int,
    model: str,
    env: dict[str, str] | None = None,
    *,
    extra: dict[str, Any] | None = None,
    ready: str = "v1/models",
) -> Iterator[Server]:
    """Run a server until the block ends, however it ends; waits for it to answer ``/{ready}``."""
    log = Path(f"/tmp/kvgate-bench-{port}.log")
    with log.open("w") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(process, f"{url}/{ready}", log)
            yield Server(f"{url}/v1", model, process.pid, extra or {})
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server and all its children, also those in a session of their own."""
    try:
        family = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        family = []
    try:
        process.terminate()
        process.wait(60)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()
    finally:
        _, alive = psutil.wait_procs(family, timeout=5)
        for child in alive:
            child.kill()
        psutil.wait_procs(alive, timeout=5)


def _wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"the server ended at start:\n{log.read_text()[-3000:]}")
        try:
            if _CLIENT.get(url, timeout=2).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    sys.exit(f"the server did not answer within 600 s; see {log}")


def kvgate_command(config: Path, port: int) -> list[str]:
    return [str(Path(sys.executable).with_name("kvgate")), "serve", "--config", str(config), "--port", str(port)]


def write_config(
    path: Path,
    *,
    device_gb: float,
    cpu_gb: float,
    disk_gb: float,
    store: Path,
    model: str = "demo",
    engine: dict[str, object] | None = None,
    **cache: object,
) -> Path:
    """A config file for the benches; sizes are in GB of bfloat16 KV, and grow with the dtype to hold as many tokens."""
    wide = native_dtype().itemsize / 2
    device_gb, cpu_gb, disk_gb = device_gb * wide, cpu_gb * wide, disk_gb * wide
    path.write_text(
        f'[model]\nname = "{model}"\ndtype = "{dtype_name()}"\n[engine]\n{_toml(engine or {})}'
        f"[prefix_cache]\ndevice_cache_gb = {device_gb}\ncpu_cache_gb = {cpu_gb}\ndisk_cache_gb = {disk_gb}\n"
        f'disk_cache_dir = "{store}"\n{_toml(cache)}'
    )
    return path


def _toml(values: dict[str, object]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items())


@dataclass(frozen=True, slots=True)
class Timing:
    ttft_s: float
    tpot_s: float | None  # mean gap between tokens after the first
    prompt_tokens: int
    cached_tokens: int
    source: str  # the x-prefix-cache header, "" where there is none
    text: str
    completion_tokens: int
    started: float  # of the request, and the end of its last token, on the client's clock
    ended: float


def ask(server: Server, system: str, question: str, max_tokens: int = 8) -> Timing:
    """One greedy streamed chat request; times are those a client sees.

    Tokens are those of the usage chunk; a server that sends none is counted by its content chunks.
    """
    body: dict[str, Any] = {
        "model": server.model,
        "messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **server.extra,
    }
    body = {key: value for key, value in body.items() if value is not None}
    started = time.perf_counter()
    stamps: list[float] = []
    pieces: list[str] = []
    usage: dict[str, Any] = {}
    with _CLIENT.stream("POST", f"{server.url}/chat/completions", json=body) as response:
        if response.status_code != 200:
            response.read()
            sys.exit(f"{response.status_code}: {response.text[:500]}")
        source = response.headers.get("x-prefix-cache", "")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            if event.get("choices") and (piece := event["choices"][0]["delta"].get("content")):
                stamps.append(time.perf_counter())
                pieces.append(piece)
    if not stamps:
        sys.exit(f"{server.model} at {server.url} answered without a word")
    details = usage.get("prompt_tokens_details") or {}
    tokens = int(usage.get("completion_tokens") or len(stamps))
    return Timing(
        ttft_s=stamps[0] - started,
        tpot_s=(stamps[-1] - stamps[0]) / (tokens - 1) if tokens > 2 and len(stamps) > 1 else None,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        cached_tokens=int(details.get("cached_tokens") or 0),
        source=source,
        text="".join(pieces),
        completion_tokens=tokens,
        started=started,
        ended=stamps[-1],
    )


#: Tokens that any two prompts share: the template's first ones.
_COMMON_START = 64


def ask_cold(server: Server, system: str, question: str, max_tokens: int = 8) -> Timing:
    """``ask``, of which nothing may be cached; ends the bench if the server says that something was."""
    timing = ask(server, system, question, max_tokens)
    if timing.cached_tokens > _COMMON_START:
        sys.exit(f"{timing.cached_tokens} tokens of a prompt that should be cold were cached: the figure means nothing")
    return timing


def warm_up(server: Server) -> None:
    """First requests pay for what is made once: thread pools, kernels, a compiled graph."""
    ask(server, "You are brief.", "Say hello.")
    ask(server, document(7, 60), "Say hello.")


def median(values: list[float]) -> float:
    return statistics.median(values) if values else float("nan")
