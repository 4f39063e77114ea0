"""What a stop string must do to an output, found by decoding everything after each token and searching all of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"


class Decoder(Protocol):
    """Part of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str: ...


class Cut(NamedTuple):
    """Text of the output without the stop string, how many tokens belong to it, and whether a stop string ended it."""

    text: str
    kept: int
    matched: bool


def certain_text(decoder: Decoder, tokens: Sequence[int]) -> str:
    """Decoded text without what the bytes of the next token may turn into another character: at most three of U+FFFD."""
    text = decoder.decode(tokens)
    broken = len(text) - len(text.rstrip(REPLACEMENT))
    return text[: len(text) - min(broken, 3)]


def plain_cut(decoder: Decoder, tokens: Sequence[int], stops: Sequence[str], minimum: int = 0) -> Cut:
    """The output whose tokens would be ``tokens`` without stop strings. minimum: tokens before which none counts."""
    before = ""
    for count in range(1, len(tokens) + 1):
        # at the end of the output all text is certain, and counts for the last token
        for text in [
            certain_text(decoder, tokens[:count]),
            *([decoder.decode(tokens)] if count == len(tokens) else []),
        ]:
            starts = [
                start
                for stop in stops
                for start in range(max(len(before) - len(stop) + 1, 0), len(text) - len(stop) + 1)
                if text.startswith(stop, start)
            ]
            if starts and count >= minimum:
                return Cut(text[: min(starts)], count, True)
            before = text
    return Cut(before, len(tokens), False)
