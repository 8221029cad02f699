"""The parts of an answer on SmolLM2 with the official client: log-probabilities."""

from __future__ import annotations

import math

from .server import ServerProcess
from .texts import chat

SHORT = chat("You are brief.", "Repeat: 🫠 龜")


def test_log_probabilities_are_the_models_own(server: ServerProcess) -> None:
    def ask(**settings: object) -> list[tuple[bytes, float, list[float]]]:
        answer = server.client.chat.completions.create(  # type: ignore[call-overload]
            model="demo", messages=SHORT, max_tokens=12, logprobs=True, top_logprobs=5, seed=1, **settings
        )
        content = answer.choices[0].logprobs.content
        text = b"".join(bytes(t.bytes) for t in content).decode("utf-8", "ignore")
        assert text == answer.choices[0].message.content
        return [(bytes(t.bytes), t.logprob, [a.logprob for a in t.top_logprobs]) for t in content]

    greedy = ask(temperature=0)
    for _, logprob, top in greedy:
        assert logprob == top[0] == max(top) <= 0, "greedy takes the best"
        assert sum(math.exp(p) for p in top) <= 1.0001
    biased = ask(temperature=0.1, logit_bias={"5": -100}, frequency_penalty=0.001)
    assert [b[0] for b in biased[:1]] == [g[0] for g in greedy[:1]]
    assert abs(biased[0][1] - greedy[0][1]) < 1e-4, "before temperature, bias and penalties"

    plain = server.client.completions.create(
        model="demo", prompt="Once upon a", max_tokens=4, temperature=0, logprobs=2
    )
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None and "".join(logprobs.tokens or []) == plain.choices[0].text
    assert logprobs.text_offset is not None and logprobs.text_offset[0] == 0
