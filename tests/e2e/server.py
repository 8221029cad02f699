"""A real `kvgate serve` process on a loopback port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from openai import OpenAI
from prometheus_client.parser import text_string_to_metric_families

KVGATE = str(Path(sys.executable).with_name("kvgate"))
START_LIMIT_S = 120


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_config(folder: Path, **sections: dict[str, Any]) -> Path:
    """A config.toml for tests: small tiers, a store in the folder, float32 (no near-ties); sections override by key."""
    settings: dict[str, dict[str, Any]] = {
        "server": {"host": "127.0.0.1"},
        "model": {"name": "demo", "max_model_len": 2048, "dtype": "float32"},
        "prefix_cache": {
            "device_cache_gb": 0.5,
            "cpu_cache_gb": 0.5,
            "disk_cache_gb": 1.0,
            "disk_cache_dir": str(folder / "store"),
        },
        "logging": {"level": "info"},
    }
    for name, section in sections.items():
        settings.setdefault(name, {}).update(section)
    lines = []
    for name, section in settings.items():
        lines.append(f"[{name}]")
        lines.extend(f"{key} = {_toml(value)}" for key, value in section.items())
    file = folder / "config.toml"
    file.write_text("\n".join(lines) + "\n")
    return file


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, (int, float)):
        return str(value)
    return '"' + str(value).replace("\\", "\\\\").replace('"', '\\"') + '"'


@dataclass
class ServerProcess:
    config: Path
    api_key: str = ""
    env: dict[str, str] | None = None

    def __enter__(self) -> ServerProcess:
        self.port = free_port()
        self.log_file = self.config.with_name(f"server-{self.port}.log")
        with self.log_file.open("wb") as sink:
            self.process = subprocess.Popen(
                [KVGATE, "serve", "--config", str(self.config), "--port", str(self.port)],
                stdout=sink,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(self.env or {})},
            )
        try:
            self._wait_ready()
        except BaseException:
            self.process.kill()
            self.process.wait()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"kvgate ended at start with {self.process.returncode}:\n{self.log}")
            try:
                if httpx.get(f"{self.root}/ready", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"kvgate was not ready in {START_LIMIT_S} s:\n{self.log}")

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                raise
        return self.process.wait()

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=self.url, api_key=self.api_key or "none", max_retries=0, timeout=120)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric whose labels include the given ones."""
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        text = httpx.get(f"{self.root}/metrics", headers=headers).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )
