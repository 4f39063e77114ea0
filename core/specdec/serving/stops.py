"""Stop strings: finds the end of an output by its text, token by token. Torch-free.

A round ends requests at token ids; text that may begin and end anywhere in a token, a run or an earlier round is matched here,
on the host. Each token is looked at in order, however many arrive at once, so that the cut is that of one-token decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from specdec.checkpoint.tokenizer import TextStream

#: Strings of one request. Each is followed through every character of the output by the host, while the device waits for the
#: next round; four times the four that the OpenAI API allows.
MAX_STOP_STRINGS = 16


@frozen(kw_only=True)
class StopOutcome:
    """What tokens brought. text: released by them. kept: how many of them belong to the output. matched: a stop string ended it.

    The last token kept is the one whose text completed the stop string; later ones are no part of the output.
    """

    text: str
    kept: int
    matched: bool


class _Needle:
    """One string and the length of its longest beginning that the text so far ends with (Knuth, Morris and Pratt)."""

    def __init__(self, string: str) -> None:
        self.string = string
        self.length = 0
        # _border[n]: longest beginning of the string that its first n characters end with, themselves excluded
        self._border = [0, 0]
        for character in string[1:]:
            self._border.append(self._longer(self._border[-1], character))

    def _longer(self, length: int, character: str) -> int:
        while length and self.string[length] != character:
            length = self._border[length]
        return length + (self.string[length] == character)

    def take(self, character: str) -> bool:
        """Whether the string is complete with this character of the text."""
        self.length = self._longer(self.length, character)
        complete = self.length == len(self.string)
        if complete:
            self.length = self._border[self.length]
        return complete


class StopMatcher:
    """Decodes the output of one request and holds back what may still become a stop string.

    The whole text so far is searched after each token, at a cost that depends on that token's text and the number of strings,
    not on the length of the output. A string is found where it is *complete*: with the first token after which the decoded
    text is certain to contain it. Characters of which bytes are missing are not certain; they are when the next token settles
    them or the output ends, U+FFFD then standing for bytes that form no character, and may be part of a stop string like any
    other. If several strings are complete with one token, the one that starts first sets the cut. The stop string and what
    follows it are no part of the text.
    """

    def __init__(self, stream: TextStream, stops: Sequence[str], minimum: int = 0) -> None:
        """stream: a fresh decoder, from now on the matcher's. stops: strings of at least one character. minimum: a string that
        is complete with a token before the ``minimum``-th ends nothing, not later either."""
        self.matched = False
        self._stream = stream
        self._needles = [_Needle(stop) for stop in stops]
        self._minimum = minimum
        self._tokens = 0
        self._held = ""

    def push(self, tokens: Sequence[int]) -> StopOutcome:
        """Takes the next tokens in order; those behind a match are not looked at. Once matched, nothing is kept any more."""
        released, kept = [], 0
        for token in tokens:
            if self.matched:
                break
            kept += 1
            self._tokens += 1
            released.append(self._search(self._stream.push([token])))
        return StopOutcome(text="".join(released), kept=kept, matched=self.matched)

    def finish(self) -> str:
        """Releases what is held back, when no more tokens follow; text that is certain only now counts for the last token."""
        if self.matched:
            return ""
        text = self._search(self._stream.finish()) + self._held
        self._held = ""
        return text

    def _search(self, text: str) -> str:
        """Adds text of the latest token and returns what is certain to stay: all of it up to the cut if there is one."""
        window = self._held + text
        starts = [
            place - len(needle.string)
            for place, character in enumerate(text, start=len(self._held) + 1)
            for needle in self._needles
            if needle.take(character)
        ]
        if starts and self._tokens >= self._minimum:
            self.matched, self._held = True, ""
            return window[: min(starts)]
        # whatever begins a stop string that later text may complete
        settled = len(window) - max((needle.length for needle in self._needles), default=0)
        self._held = window[settled:]
        return window[:settled]
