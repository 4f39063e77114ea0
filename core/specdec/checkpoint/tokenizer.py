"""Text to token ids and back, and a decoder for text that arrives token by token.

A byte-level vocabulary may cut a character's UTF-8 bytes over several tokens. Decoding each token alone would print
replacement characters; :class:`TextStream` holds text back until its last character is whole.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as _Tokenizer

from specdec.errors import CheckpointError

_FILE = "tokenizer.json"
_REPLACEMENT = "\ufffd"
# The beginning of a character is at most three bytes, which decoders show as one or as three replacement characters.
_MAX_INCOMPLETE = 3
# Text that has not once ended on a whole character for this many tokens is no text; without a bound it would cost ever more.
_MAX_PENDING = 256


class Tokenizer:
    """A ``tokenizer.json``, loaded. Build it with :meth:`load`."""

    def __init__(self, tokenizer: _Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Load ``tokenizer.json`` from a checkpoint directory.

        Raises:
            CheckpointError: if the file is missing or is no tokenizer.
        """
        path = Path(directory) / _FILE
        if not path.is_file():
            raise CheckpointError(f"{path}: no such file; the checkpoint needs its {_FILE}")
        try:
            return cls(_Tokenizer.from_file(str(path)))
        except Exception as error:  # the tokenizers library raises bare Exception
            raise CheckpointError(f"{path}: not a usable tokenizer: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def to_json(self) -> str:
        """Return the tokenizer as the text of a ``tokenizer.json``."""
        return self._tokenizer.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of ``text``."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of ``ids``; bytes that form no character become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its own spelling (special tokens), or None."""
        return self._tokenizer.token_to_id(token)

    def token(self, token_id: int) -> str | None:
        """Return a token's own spelling in the vocabulary, or None for an id without one."""
        return self._tokenizer.id_to_token(token_id)

    def stream(self, *, skip_special_tokens: bool = True) -> "TextStream":
        """Return a new incremental decoder."""
        return TextStream(self, skip_special_tokens=skip_special_tokens)


class TextStream:
    """Turns tokens into text as they arrive; the pieces joined equal the decoding of all tokens at once.

    Only the tokens since the last whole character are decoded again, behind those decoded before them, which decoders that
    treat a first token differently need as context. So the cost of a call does not grow with the length of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._context: list[int] = []
        self._pending: list[int] = []
        self._emitted = 0  # characters of the pending tokens' text that were already returned

    def push(self, ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that is now certain; empty while a character is incomplete."""
        return "".join(self._push_one(token) for token in ids)

    def finish(self) -> str:
        """Return the text still held back, U+FFFD standing for bytes that form no character; the stream is then empty."""
        text = self._pending_text()[self._emitted :]
        self._context, self._pending, self._emitted = [], [], 0
        return text

    def _push_one(self, token: int) -> str:
        self._pending.append(token)
        text = self._pending_text()
        broken = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_INCOMPLETE)
        certain = text if len(self._pending) >= _MAX_PENDING else text[: len(text) - broken]
        new = certain[self._emitted :]
        if len(certain) < len(text):
            self._emitted = max(self._emitted, len(certain))
            return new
        # A skipped special token has no text and is no context for the next one.
        self._context = self._pending if text else self._context
        self._pending, self._emitted = [], 0
        return new

    def _pending_text(self) -> str:
        context = self._tokenizer.decode(self._context, skip_special_tokens=self._skip)
        whole = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=self._skip)
        return whole[len(context) :]
