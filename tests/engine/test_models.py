"""Greedy answers of the paged runner against transformers' own generate, and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from gateway.engine import attention
from gateway.engine.linears import can_pack, pack_linears
from gateway.engine.loader import LoadedModel, load_model
from gateway.engine.runner import ModelRunner, Work, padded_rows, self_check
from gateway.engine.sources import ModelError
from kvstore.layout import KVLayout
from kvstore.tiers.device import DeviceArena

from .models import REFUSED, SERVED, VOCAB, save_model

CHUNK = 32

#: Page tables with adjacent and scattered pages, so that runs of several pages and jumps both occur.
PAGES = [[5, 6, 7, 2, 3, 11, 12], [9, 1, 14, 15, 0, 4, 8]]


def with_tokenizer(folder: Path, demo_folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder / name, folder / name)
    return folder


def arena_for(loaded: LoadedModel, pages: int = 16, chunk: int = CHUNK) -> DeviceArena:
    g = loaded.geometry
    return DeviceArena(KVLayout(g.layers, g.kv_heads, g.head_dim, loaded.dtype, chunk), pages, loaded.device)


def prefill(runner: ModelRunner, prompt: list[int], pages: list[int], chunk: int = CHUNK) -> torch.Tensor:
    logits = torch.empty(0)
    for at in range(0, len(prompt), chunk):
        logits = runner.forward([Work(prompt[at : at + chunk], at, pages, at + chunk >= len(prompt))])
    return logits


def reference(loaded: LoadedModel, prompt: list[int], n: int, implementation: str = "eager") -> list[int]:
    loaded.model.set_attn_implementation(implementation)
    try:
        with torch.inference_mode():
            out: Any = loaded.model.generate(
                torch.tensor([prompt]), max_new_tokens=n, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return out[0, len(prompt) :].tolist()
    finally:
        loaded.model.set_attn_implementation(attention.ATTENTION_NAME)


@pytest.mark.parametrize("family", SERVED)
def test_greedy_equals_generate_alone_and_batched(family: str, tmp_path: Path, demo_folder: Path) -> None:
    loaded = load_model(str(with_tokenizer(save_model(SERVED[family], tmp_path), demo_folder)), dtype="float32")
    self_check(loaded)
    runner = ModelRunner(loaded, arena_for(loaded))
    torch.manual_seed(3)
    prompts = [torch.randint(3, VOCAB, (length,)).tolist() for length in (100, 65)]
    wanted = [reference(loaded, prompt, 30) for prompt in prompts]
    answers: list[list[int]] = [[], []]
    tokens = [int(prefill(runner, prompt, pages)[0].argmax()) for prompt, pages in zip(prompts, PAGES, strict=True)]
    for step in range(30):
        for answer, token in zip(answers, tokens, strict=True):
            answer.append(token)
        logits = runner.forward([Work([tokens[i]], len(prompts[i]) + step, PAGES[i], True) for i in range(2)])
        tokens = [int(row.argmax()) for row in logits]
    assert answers == wanted
    assert len(set(wanted[0])) > 5, "an answer that repeats one token would hide faults"


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_cannot_be_served_are_refused_with_the_reason(case: str, tmp_path: Path, demo_folder: Path) -> None:
    config, reason = REFUSED[case]
    folder = with_tokenizer(save_model(config, tmp_path), demo_folder)
    with pytest.raises(ModelError, match="can't be served") as caught:
        load_model(str(folder), dtype="float32")
    assert reason in str(caught.value)


def test_longrope_is_served_within_its_original_length(tmp_path: Path, demo_folder: Path) -> None:
    config, _ = REFUSED["phi3-longrope"]
    folder = with_tokenizer(save_model(config, tmp_path), demo_folder)
    loaded = load_model(str(folder), dtype="float32", max_model_len=256)
    self_check(loaded)
    assert loaded.max_model_len == 256


def test_the_self_check_refuses_attention_that_is_not_ours(
    tmp_path: Path, demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose attention wants something we don't know gives other logits: shown by breaking ours."""
    loaded = load_model(str(with_tokenizer(save_model(SERVED["llama"], tmp_path), demo_folder)), dtype="float32")
    monkeypatch.setattr(attention, "_add_mask", lambda *_: None)
    with pytest.raises(ModelError, match="logits differ"):
        self_check(loaded)


@pytest.mark.parametrize(
    ("name", "words"),
    [("/no/such/folder", "no folder"), ("./missing.gguf", "no GGUF file"), ("no-such-org/no-such-model", "hub id")],
)
def test_a_missing_model_says_what_to_do(name: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=words):
        load_model(name)


class TestDemoModel:
    """SmolLM2-135M-Instruct itself."""

    TEXT = "You are a careful assistant. The pump is kept by the water team and reviewed every nine days. " * 30

    def prompt(self, tokenizer: Any) -> list[int]:
        chat = [{"role": "system", "content": self.TEXT}, {"role": "user", "content": "Who keeps the pump?"}]
        return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)["input_ids"])

    def test_greedy_equals_generate_in_float32(self, demo_folder: Path) -> None:
        loaded = load_model(str(demo_folder), dtype="float32")
        prompt = self.prompt(loaded.tokenizer)
        wanted = reference(loaded, prompt, 24, "sdpa")
        runner = ModelRunner(loaded, arena_for(loaded, 16, 256))
        logits = prefill(runner, prompt, [3, 4, 8, 9], 256)
        answer = []
        for step in range(24):
            answer.append(int(logits[0].argmax()))
            logits = runner.forward([Work([answer[-1]], len(prompt) + step, [3, 4, 8, 9], True)])
        assert answer == wanted

    @pytest.mark.parametrize("n", [*range(1, 70), 127, 129, 257, 300, 2047])
    def test_padding_is_one_row_or_less_than_a_quarter(self, n: int) -> None:
        assert n <= padded_rows(n) <= max(n + 1, n * 5 / 4)
        assert padded_rows(padded_rows(n)) == padded_rows(n)

    def test_padding_rows_change_no_logits_and_write_no_kv(
        self, demo_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        loaded = load_model(str(demo_folder), dtype="float32")
        pack_linears(loaded.model)
        prompts = [self.prompt(loaded.tokenizer)[:11], self.prompt(loaded.tokenizer)[20:26]]

        def run() -> tuple[torch.Tensor, ...]:
            arena = arena_for(loaded, 4, 16)
            arena.kv.fill_(7.0)
            runner = ModelRunner(loaded, arena)
            logits = runner.forward([Work(prompts[0], 0, [2], True), Work(prompts[1], 0, [0], True)])
            return logits, runner.forward([Work([5], 11, [2], True)]), arena.kv

        padded = run()
        assert padded_rows(17) == 20
        monkeypatch.setattr("gateway.engine.runner.padded_rows", lambda n: n)
        assert all(torch.equal(ours, exact) for ours, exact in zip(padded, run(), strict=True))
        slots = padded[-1].movedim(-2, 0).flatten(1)
        written = {int(slot) for slot in (slots != 7.0).any(1).nonzero()}
        assert written == {*range(32, 44), *range(6)}

    def test_bfloat16_is_as_near_to_float32_as_sdpa_is(self, demo_folder: Path) -> None:
        """KL to the float32 model over the last positions: ours at most 1.5x that of transformers' sdpa."""
        exact = load_model(str(demo_folder), dtype="float32")
        prompt = self.prompt(exact.tokenizer)
        half = load_model(str(demo_folder), dtype="bfloat16")

        def log_probabilities(loaded: LoadedModel) -> torch.Tensor:
            loaded.model.set_attn_implementation("sdpa")
            with torch.inference_mode():
                logits = loaded.model(torch.tensor([prompt]), logits_to_keep=16, use_cache=False).logits[0]
            loaded.model.set_attn_implementation(attention.ATTENTION_NAME)
            return torch.log_softmax(logits.float(), -1)

        truth, sdpa = log_probabilities(exact), log_probabilities(half)
        assert (pack_linears(half.model) > 200) == can_pack(torch.bfloat16)
        runner = ModelRunner(half, arena_for(half, 16, 256))
        start = len(prompt) - 16
        prefill(runner, prompt[:start], [3, 4, 8, 9], 256)
        rows = [runner.forward([Work([prompt[i]], i, [3, 4, 8, 9], True)])[0] for i in range(start, len(prompt))]
        ours = torch.log_softmax(torch.stack(rows).float(), -1)

        def divergence(other: torch.Tensor) -> float:
            return float((truth.exp() * (truth - other)).sum(-1).mean())

        assert divergence(ours) <= 1.5 * divergence(sdpa) + 1e-4
