"""Long, varied prompts; other seeds share nothing."""

from __future__ import annotations

_WORDS = (
    "pump valve router battery sensor filter panel ledger bridge engine cable meter switch tower garden window "
    "paper window lantern harbour mountain letter number signal record silver copper market summer winter"
).split()


def document(seed: int, sentences: int) -> str:
    """About 16 tokens a sentence with SmolLM2's tokenizer."""
    lines = [f"Handbook {seed}."]
    for i in range(sentences):
        k = i * 7919 + seed * 104729
        a, b, c = (_WORDS[(k // d) % len(_WORDS)] for d in (1, 31, 961))
        lines.append(f"Rule {i}: the {a} is kept near the {b} and checked by the {c} team.")
    return " ".join(lines)


def chat(system: str, question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]
