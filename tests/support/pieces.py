"""Small byte-level vocabularies of chosen pieces."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer as Library
from tokenizers import decoders
from tokenizers.models import BPE

from specdec.checkpoint.tokenizer import Tokenizer

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
#: The published byte-to-character table of byte-level BPE.
LETTERS = {byte: chr(byte) for byte in _PRINTABLE} | {byte: chr(256 + place) for place, byte in enumerate(_OTHERS)}


class Pieces:
    """A vocabulary of the given byte pieces and one special token, which has no text."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        ids = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
        vocabulary = {"".join(LETTERS[byte] for byte in piece): number for piece, number in ids.items()}
        library = Library(BPE(vocab=vocabulary, merges=[]))
        library.decoder = decoders.ByteLevel()
        library.add_special_tokens(["<|none|>"])
        self.ids = ids | {b"": len(ids)}
        self.tokenizer = Tokenizer(library)

    def tokens(self, pieces: Iterable[bytes]) -> list[int]:
        """Their ids; the empty piece is the special token."""
        return [self.ids[piece] for piece in pieces]
