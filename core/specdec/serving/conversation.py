"""The tokens of a chat, turn by turn. Torch-free.

Each turn's prompt begins with the very tokens of the turns before it, generated ones as they were generated, so that a prefix
checkpoint of the last turn has all of them. Encoding the whole text anew would not do: the same text may be spelled with other
tokens than those that were drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from specdec.checkpoint.chat import ChatTemplate
    from specdec.checkpoint.tokenizer import Tokenizer

__all__ = ["Conversation"]


@frozen
class _Past:
    """Tokens and the text that they stand for."""

    tokens: tuple[int, ...] = ()
    text: str = ""


class Conversation:
    """A chat with one model.

    With a chat template the text is what it makes of the messages. Without, the texts of turns and answers follow each other as
    they are, the system text first; what ended an answer is then no part of it.
    """

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None = None, *, system: str | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
        # what may be the beginning of the next prompt, the most complete one first
        self._pasts: tuple[_Past, ...] = (_Past(),)
        self._asked = _Past()

    def ask(self, text: str) -> tuple[int, ...]:
        """The prompt of a turn. Follow it with ``answered`` or ``withdraw``. Raises as ``ChatTemplate.render`` does."""
        self._messages.append({"role": "user", "content": text})
        if self._template is None:
            whole = "".join(message["content"] for message in self._messages)
        else:
            try:
                whole = self._template.render(self._messages)
            except BaseException:
                self.withdraw()
                raise
        past = next((past for past in self._pasts if whole.startswith(past.text)), _Past())
        # special tokens are in the template's text, so none is added
        tokens = (*past.tokens, *self._tokenizer.encode(whole[len(past.text) :]))
        self._asked = _Past(tokens, whole)
        return tokens

    def withdraw(self) -> None:
        """Takes back a turn that was asked and not answered."""
        self._messages.pop()

    def answered(self, tokens: Sequence[int], text: str, *, stopped: bool) -> None:
        """Takes in the answer to the turn that was asked. stopped: its last token is a stop id and no part of its text."""
        self._messages.append({"role": "assistant", "content": text})
        asked, body = self._asked, tuple(tokens[:-1] if stopped else tokens)
        if self._tokenizer.decode(body) != text:
            # a stop string was cut off: the tokens stand for more than the text
            body, stopped = tuple(self._tokenizer.encode(text)), False
        answer = _Past(asked.tokens + body, asked.text + text)
        # the question alone serves where the template changes answers, as by trimming them
        self._pasts = (answer, asked)
        end = self._tokenizer.token(tokens[-1]) if stopped and self._template is not None else None
        if end is not None:
            # the model wrote what the template puts behind an answer
            self._pasts = (_Past((*answer.tokens, tokens[-1]), answer.text + end), *self._pasts)
