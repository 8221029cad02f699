"""How each server that is measured is started: us and the peers, with as many threads as there are cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.common import Server, dtype_name, free_port, kvgate_command, native_dtype, running, write_config
from gateway.engine.sources import resolve_source


def demo_folder() -> str:
    """The demo model as a Hugging Face folder, unpacked if it isn't yet."""
    return resolve_source("demo", native_dtype())


@contextmanager
def start_kvgate(folder: Path, model: str, speculation: bool) -> Iterator[Server]:
    path, engine = folder / "config.toml", {"speculation": speculation}
    write_config(path, device_gb=1, cpu_gb=1, disk_gb=4, store=folder / "store", model=model, engine=engine)
    port = free_port()
    with running(kvgate_command(path, port), port, model, extra={"ignore_eos": True}) as server:
        yield server


@contextmanager
def start_vllm(venv: Path, model: str) -> Iterator[Server]:
    port = free_port()
    command = [
        str(venv / "bin" / "vllm"), "serve", model, "--dtype", dtype_name(), "--max-model-len", "8192",
        "--port", str(port), "--host", "127.0.0.1", "--enable-prefix-caching",
    ]  # fmt: skip
    env = {
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(native_dtype().itemsize),
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
    }
    with running(command, port, model, env, extra={"ignore_eos": True}) as server:
        yield server


@contextmanager
def start_llama(venv: Path, gguf: Path) -> Iterator[Server]:
    port, threads = free_port(), str(os.cpu_count() or 1)
    command = [
        str(venv / "bin" / "python"), "-m", "llama_cpp.server", "--model", str(gguf), "--n_ctx", "8192",
        "--n_threads", threads, "--n_threads_batch", threads, "--host", "127.0.0.1", "--port", str(port),
        "--interrupt_requests", "false", "--model_alias", "demo",
    ]  # fmt: skip
    # It doesn't know ignore_eos; the bias keeps SmolLM2's end token (2) away.
    with running(command, port, "demo", extra={"logit_bias": {"2": -100}}) as server:
        yield server


@contextmanager
def start_transformers(venv: Path, model: str) -> Iterator[Server]:
    port = free_port()
    command = [
        str(venv / "bin" / "transformers"), "serve", model, "--dtype", dtype_name(),
        "--host", "127.0.0.1", "--port", str(port), "--model-timeout", "100000",
    ]  # fmt: skip
    # It refuses stream_options, and sends usage without being asked.
    with running(
        command, port, model, {"HF_HUB_OFFLINE": "1"}, extra={"stream_options": None}, ready="health"
    ) as server:
        yield server
