"""A tokenizer from a GGUF file's vocabulary: byte-level pair encoding, as GGUF calls ``gpt2``. No torch here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specdec.errors import CheckpointError

#: How text is cut before pairs are merged, by ``tokenizer.ggml.pre``: every digit alone, then words, numbers, signs and spaces.
PRE_TOKENIZERS = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
}
# Values of tokenizer.ggml.token_type.
_CONTROL, _USER_DEFINED = 3, 4


def build_tokenizer(path: Path, values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that ``values``, the metadata of the file ``path``, describe.

    Raises CheckpointError if it is of another kind, or incomplete.
    """
    kind, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise CheckpointError(f"{path}: tokenizer.ggml.model is {kind!r}, allowed: 'gpt2'")
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(f"{path}: tokenizer.ggml.pre is {pre!r}, allowed: {', '.join(map(repr, PRE_TOKENIZERS))}")
    tokens, merges = values.get("tokenizer.ggml.tokens"), values.get("tokenizer.ggml.merges")
    if not tokens or not merges:
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens or tokenizer.ggml.merges is missing")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    try:
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise CheckpointError(f"{path}: not a usable vocabulary: {error}") from error
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    kinds = values.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    added = {_CONTROL: True, _USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, special=added[kind], normalized=False)
            for token, kind in zip(tokens, kinds, strict=False)
            if kind in added
        ]
    )
    return tokenizer
