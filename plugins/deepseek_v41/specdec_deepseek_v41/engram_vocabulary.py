"""Compressed token ids: tokens whose texts differ only in case, accents or spacing share one id of the Engram hash.

The map follows from the tokenizer alone. Released checkpoints come with the tokenizer, and the map is built when they load;
checkpoints without one store it as the tensor :data:`~specdec_deepseek_v41.inventory.COMPRESSED_IDS`. Preparation only.
"""

from __future__ import annotations

import torch
from tokenizers import Regex, normalizers
from torch import Tensor

from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.tokenizer import Tokenizer
from specdec.errors import CheckpointError

from .geometry import Geometry
from .inventory import COMPRESSED_IDS

__all__ = ["compressed_ids", "load_compressed_ids", "normalised"]

_REPLACEMENT = "\ufffd"
# Stands for a text of one space while the ends are stripped.
_SENTINEL = "\ue000"
_NORMALISER = normalizers.Sequence(
    [
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(Regex(r"^ $"), _SENTINEL),
        normalizers.Strip(),
        normalizers.Replace(_SENTINEL, " "),
    ]
)


def normalised(text: str) -> str:
    """Return ``text`` without accents, in lower case, each run of spaces, tabs and line ends as one space, and stripped.

    A text of nothing but such characters is one space.
    """
    return str(_NORMALISER.normalize_str(text))


def compressed_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the compressed id of every token id, numbered in the order in which they appear.

    Tokens share an id if their normalised texts are equal. A token that is no whole text counts by its vocabulary entry, one
    whose text normalises to nothing by the text itself.
    """
    numbers: dict[str, int] = {}
    found = []
    for token in range(tokenizer.vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = (tokenizer.token(token) or text) if _REPLACEMENT in text else (normalised(text) or text)
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def load_compressed_ids(checkpoint: Checkpoint, geometry: Geometry) -> Tensor:
    """Return the compressed id of every token of the vocabulary, int64 [vocab_size] on the CPU.

    Stored ids are taken as they are; otherwise they are built from the ``tokenizer.json`` beside the weights. Ids of the
    vocabulary that no tokenizer produces have the compressed id of padding.

    Raises:
        CheckpointError: if there are neither stored ids nor a tokenizer, there are more than ``vocab_size``, or they are not
            as many different ones as the configuration says.
    """
    count, vocabulary = geometry.engram_compressed_vocab_size, geometry.vocab_size
    if COMPRESSED_IDS in checkpoint:
        where = f"{checkpoint.stored(COMPRESSED_IDS).path}: tensor {COMPRESSED_IDS}"
        stored = checkpoint.stored(COMPRESSED_IDS)
        if stored.dtype != "int32" or len(stored.shape) != 1:
            raise CheckpointError(f"{where}: expected int32 [n], found {stored.dtype} {list(stored.shape)}")
        ids = checkpoint.load(COMPRESSED_IDS).long()
    else:
        where = f"{checkpoint.directory / 'tokenizer.json'}: compressed ids"
        ids = torch.tensor(compressed_ids(checkpoint.tokenizer()), dtype=torch.int64)
    pad = geometry.engram_pad_token_id
    if not pad < len(ids) <= vocabulary:
        raise CheckpointError(
            f"{where}: {len(ids)} ids, allowed: more than the padding token {pad}, at most {vocabulary}"
        )
    if not torch.equal(ids.unique(), torch.arange(count)):
        raise CheckpointError(
            f"{where}: {len(ids.unique())} different ids from {int(ids.min())} to {int(ids.max())}, config.json needs "
            f"engram_compressed_vocab_size = {count}, numbered from 0; is it the tokenizer of this checkpoint?"
        )
    return torch.cat((ids, ids[pad].expand(vocabulary - len(ids))))
