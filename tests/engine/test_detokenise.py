from typing import Any

import pytest

from gateway.engine.detokenise import Detokeniser

#: The vocabulary splits most of these characters over several tokens.
TEXTS = (
    "Plain words, with 3 numbers: 12345.",
    "🫠🫠 and U+9F9C 龜, 韓國語: 한국어 텍스트, emoji 👩‍👩‍👧‍👦 end",
    "def f(x):\n\treturn  x  # spaces   kept\n\n\n",
    "naïve café Ελληνικά русский العربية हिन्दी",
)


def pieces(tokenizer, text, stop=(), prompt="Say: "):  # type: ignore[no-untyped-def]
    decoder = Detokeniser(tokenizer, tokenizer(prompt)["input_ids"], stop)
    out = []
    for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
        out.append(decoder.add(token))
        if decoder.stopped:
            break
    return [*out, decoder.finish()], decoder


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_hold_whole_characters(demo_tokenizer, text) -> None:  # type: ignore[no-untyped-def]
    parts, _ = pieces(demo_tokenizer, text)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_a_character_cut_by_the_token_limit_is_left_out(demo_tokenizer) -> None:  # type: ignore[no-untyped-def]
    ids = demo_tokenizer("ab 🫠", add_special_tokens=False)["input_ids"]
    decoder = Detokeniser(demo_tokenizer, [])
    text = "".join(decoder.add(i) for i in ids[:-1]) + decoder.finish()
    assert text.strip() == "ab"


@pytest.mark.parametrize("stop", ["brown fox", "n f", "The", " dog."])
def test_stop_strings_over_token_borders_never_leak(demo_tokenizer, stop) -> None:  # type: ignore[no-untyped-def]
    text = "The quick brown fox jumps over the lazy dog. And on."
    parts, decoder = pieces(demo_tokenizer, text, (stop,))
    assert decoder.stopped
    assert "".join(parts) == text[: text.index(stop)]


def test_text_held_for_a_stop_that_does_not_come_is_released(demo_tokenizer) -> None:  # type: ignore[no-untyped-def]
    text = "Stop signs are red. The quick brown"
    parts, decoder = pieces(demo_tokenizer, text, ("brown fox", "quick red"))
    assert not decoder.stopped
    assert "".join(parts) == text


def test_the_earliest_of_several_stops_wins(demo_tokenizer) -> None:  # type: ignore[no-untyped-def]
    parts, _ = pieces(demo_tokenizer, "one two three four", ("four", "two"))
    assert "".join(parts) == "one "


def test_shown_special_tokens_are_text_and_others_are_not(demo_tokenizer: Any) -> None:
    ids = [*demo_tokenizer.encode("a b"), 1, *demo_tokenizer.encode(" c"), 2, *demo_tokenizer.encode("d")]
    plain, shown = Detokeniser(demo_tokenizer, []), Detokeniser(demo_tokenizer, [], shown={1})
    assert "".join([*map(plain.add, ids), plain.finish()]) == "a b cd"
    assert "".join([*map(shown.add, ids), shown.finish()]) == "a b<|im_start|> cd"
