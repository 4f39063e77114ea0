"""Hashed n-gram lookups: compressed token ids of a tokenizer, hash constants, table rows of whole sequences.

Nothing here is learned; everything follows from the tokenizer and the configuration.
"""

import json
import unicodedata
from pathlib import Path

import numpy
import torch
from training.storage import hash_tables

_MAX = 2**63 - 1
# Stands for a lone space while the ends of a text are stripped.
_SENTINEL = "\ue000"


def _byte_of_symbol() -> dict[str, int]:
    """The byte that each symbol of a byte-level vocabulary stands for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


def _normalised(text: str) -> str:
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower()
    for blank in "\t\r\n":
        text = text.replace(blank, " ")
    while "  " in text:
        text = text.replace("  ", " ")
    text = _SENTINEL if text == " " else text
    return text.strip().replace(_SENTINEL, " ")


def compressed_ids(tokenizer: Path) -> list[int]:
    """Returns the compressed id of every token id of a byte-level BPE ``tokenizer.json``.

    Ids whose texts are equal after normalisation share one; numbered in order of first appearance.
    """
    content = json.loads(tokenizer.read_text(encoding="utf-8"))
    special = {entry["id"]: entry["content"] for entry in content["added_tokens"]}
    symbols = {i: symbol for symbol, i in content["model"]["vocab"].items()} | special
    byte_of, numbers, found = _byte_of_symbol(), {}, []
    for i in range(len(symbols)):
        text = special.get(i)
        if text is None:
            text = bytes(byte_of[c] for c in symbols[i]).decode("utf-8", errors="replace")
        key = symbols[i] if "\ufffd" in text else _normalised(text) or text
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def multipliers(layer: int, vocabulary: int, count: int) -> list[int]:
    """Odd hash multipliers of a layer, newest token first; products with compressed ids stay below 2⁶³."""
    bound = max(1, (_MAX // vocabulary) // 2)
    drawn = numpy.random.default_rng(10007 * layer).integers(0, bound, size=count, dtype=numpy.int64)
    return (drawn * 2 + 1).tolist()


class Lookup:
    """Table rows of one layer: n-gram size outer, head inner."""

    def __init__(self, config: dict, ordinal: int, device: torch.device):
        sizes, heads = config["engram_max_ngram_size"], config["engram_n_heads"]
        count = (sizes - 1) * heads
        vocabulary, layer = config["engram_compressed_vocab_size"], config["engram_layer_ids"][ordinal]
        own = hash_tables.primes(base=config["engram_vocab_size"], heads=count, ordinal=ordinal)
        self.heads, self.multipliers = heads, multipliers(layer, vocabulary, sizes)
        self.primes = torch.tensor(own, device=device)
        self.offsets = self.primes.cumsum(0) - self.primes

    def rows(self, history: torch.Tensor) -> torch.Tensor:
        """``history [B, T, n]`` compressed ids, newest first → table rows ``[B, T, (n − 1) · heads]`` int64."""
        mixed, found = history[..., 0] * self.multipliers[0], []
        for lag in range(1, history.shape[-1]):
            mixed = mixed ^ (history[..., lag] * self.multipliers[lag])
            found += [mixed] * self.heads
        return torch.stack(found, -1) % self.primes + self.offsets


def histories(ids: torch.Tensor, pad: torch.Tensor, count: int) -> torch.Tensor:
    """Compressed ids ``[B, T]`` of whole sequences → the last ``count`` of every row, newest first; ``pad`` before the start."""
    columns = [ids]
    for lag in range(1, count):
        blank = pad.expand(ids.shape[0], min(lag, ids.shape[1]))
        columns.append(torch.cat([blank, ids[:, :-lag]], 1))
    return torch.stack(columns, -1)
