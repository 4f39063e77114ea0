"""Multipliers, table sizes and row ids of the Engram hash, and the compressed ids of a tokenizer."""

import itertools
import math

import pytest
import torch
from deepseek_models import GOLDEN_PROMPT, config, golden_tensors, tiny_compressed_ids, write_golden_checkpoint
from tokenizers import AddedToken, Tokenizer, decoders, models

from specdec.checkpoint import Checkpoint
from specdec.checkpoint.tokenizer import Tokenizer as OurTokenizer
from specdec.checkpoint.writer import write_checkpoint
from specdec.errors import CheckpointError
from specdec.testing.guard import CapturableGuard
from specdec_deepseek_v41.engram_hash import bounded_draws, row_ids
from specdec_deepseek_v41.engram_rows import RowIds
from specdec_deepseek_v41.engram_vocabulary import compressed_ids, load_compressed_ids, normalised
from specdec_deepseek_v41.geometry import REAL, TINY
from specdec_deepseek_v41.inventory import COMPRESSED_IDS

MULTIPLIERS = {
    (REAL, 1): (76632096046245, 4839876093313, 35959672319349, 73987337458391),
    (REAL, 14): (67716810739261, 51510806800915, 30921347202721, 82619226485591),
    (TINY, 1): (19775072034933939, 1248940108954747, 9279468357992093, 19092586571424545),
    (TINY, 4): (21227420795207501, 1300012726952735, 19006427355547079, 4891341875574655),
}
# What exceeds sixteen million.
REAL_PRIMES = {
    1: [57, 79, 81, 97, 121, 129, 133, 183, 189, 207, 211, 253, 277, 289, 307, 321, 339, 381, 393, 399, 403, 409, 447, 463],
    14: [477, 487, 499, 507, 511, 573, 609, 627, 667, 669, 693, 697, 711, 729, 759, 769, 781, 799, 813, 819, 841, 877, 879,
         889],
}  # fmt: skip
ROWS = {
    1: [22259, 23259088, 41371678, 58272182, 67624233, 92075454, 96301072, 117124931, 142558994, 150547688, 162989874,
        181633912, 192289736, 213618501, 237612242, 249163395, 261693639, 281928537, 299139980, 315746102, 326816926,
        343423276, 352597450, 380883595],
    14: [738671, 18973607, 47256193, 55444531, 75539291, 83005306],
}  # fmt: skip


@pytest.mark.parametrize(("geometry", "layer"), MULTIPLIERS)
def test_multipliers(geometry, layer):
    assert geometry.engram_multipliers(layer) == MULTIPLIERS[geometry, layer]
    assert max(geometry.engram_multipliers(layer)) * (geometry.engram_compressed_vocab_size - 1) < 2**63


def test_draws_are_those_of_numpy():
    numpy = pytest.importorskip("numpy")
    # the last bounds reject about every fourth and every second draw
    bounds = (2**32 + 1, 46539438283891, 2**62 + 2**60, 2**63 - 1, 2**63)
    for seed, bound in itertools.product((0, 1, 10007, 140098, 2**40 + 3), bounds):
        drawn = numpy.random.default_rng(seed).integers(0, bound, size=40, dtype=numpy.uint64)
        assert bounded_draws(seed, bound, 40) == tuple(drawn.tolist())


@pytest.mark.parametrize("bound", [1, 2**32, 2**63 + 1])
def test_a_range_that_numpy_draws_in_another_way_is_refused(bound):
    with pytest.raises(ValueError, match="above 2\\^32"):
        bounded_draws(1, bound, 4)


def test_table_sizes():
    for layer, above in REAL_PRIMES.items():
        assert [prime - 16_000_000 for prime in REAL.engram_primes(layer)] == above
    naive = [n for n in range(64, 120) if all(n % d for d in range(2, math.isqrt(n) + 1))]
    assert TINY.engram_primes(1) + TINY.engram_primes(4) == tuple(naive[:12])


def rows(geometry, layer, window):
    return list(row_ids(window, geometry.engram_multipliers(layer), geometry.engram_primes(layer)))


def test_rows_of_the_real_model():
    for layer, expected in ROWS.items():
        assert rows(REAL, layer, (5, 4, 3, 2))[: len(expected)] == expected
    assert rows(REAL, 14, (5, 4, 3, 2))[-2:] == [353876790, 382776724]


@pytest.mark.parametrize(
    ("position", "window", "first", "second"),
    [
        (0, (80, 17, 17, 17), [23, 106, 203, 221, 306, 373], [85, 181, 250, 345, 460, 575]),
        (2, (214, 339, 80, 17), [8, 131, 170, 231, 351, 409], [6, 140, 273, 346, 500, 624]),
        (40, (200, 325, 66, 191), [24, 70, 146, 232, 321, 412], [76, 119, 213, 388, 427, 591]),
    ],
)
def test_rows_of_the_tiny_model(position, window, first, second):
    ids = tiny_compressed_ids()
    seen = [int(ids[token]) for token in GOLDEN_PROMPT[: position + 1]][::-1][:4]
    assert (*seen, 17, 17, 17)[:4] == window
    assert rows(TINY, 1, window) == first and rows(TINY, 4, window) == second


@pytest.mark.parametrize(("geometry", "layer"), MULTIPLIERS)
def test_rows_of_many_windows_at_once(geometry, layer):
    generator = torch.Generator().manual_seed(layer)
    windows = torch.randint(geometry.engram_compressed_vocab_size, (3, 5, 4), generator=generator)
    program = RowIds.of(geometry, layer, torch.device("cpu"))
    with CapturableGuard() as guard:
        found = program(windows)
        guard.allow(found)
    assert found.shape == (3, 5, geometry.engram_rows) and found.dtype == torch.int64
    for window, ids in zip(windows.flatten(0, 1).tolist(), found.flatten(0, 1).tolist(), strict=True):
        assert ids == rows(geometry, layer, window)


def test_against_another_implementation():
    theirs = pytest.importorskip("b12x.sequence.engram.geometry").build_geometry()
    reference = pytest.importorskip("b12x.sequence.engram.reference").hash_reference
    assert theirs.primes == tuple(REAL.engram_primes(layer) for layer in (1, 14))
    assert theirs.multipliers == tuple(REAL.engram_multipliers(layer) for layer in (1, 14))
    assert theirs.num_embeddings == REAL.engram_num_embeddings
    tokens = [9, 70_000, 2, 99_091, 5]
    identity = list(range(99_092))
    for layer in (1, 14):
        found = reference(tokens, [True] * 5, [0, 5], [0], [[-1] * 3], identity, theirs, layer)
        history = [2, 2, 2, *tokens]
        windows = torch.tensor([history[place : place + 4][::-1] for place in range(5)])
        assert torch.equal(found, RowIds.of(REAL, layer, torch.device("cpu"))(windows))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Word", "word"),
        (" word ", "word"),
        ("naïve", "naive"),
        ("ﬁne", "fine"),  # a ligature
        ("Ａ１", "a1"),  # full width
        ("a \t\r\n b", "a b"),
        (" ", " "),
        ("\t\n", " "),
        ("\u0301", ""),  # an accent alone
        ("\u3000", " "),  # a wide space becomes a plain one before runs are joined
        ("", ""),
    ],
)
def test_normalised_text(text, expected):
    assert normalised(text) == expected


VOCABULARY = ["<pad>", "Ġ", "Ċ", "ĠWord", "word", "WORD", "Ð", "Ð°", "Ã©", "e", "Ì", "ÌĢ", "ÌĢÌĢ", "E"]


def small_tokenizer(path):
    """Byte-level entries: spellings of one text, two beginnings of characters, accents without a letter, a special token."""
    tokenizer = Tokenizer(models.BPE(vocab={word: place for place, word in enumerate(VOCABULARY)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True), AddedToken("<END>", special=True)])
    tokenizer.save(str(path / "tokenizer.json"))
    return OurTokenizer.load(path)


#        pad  space newline word ×3  half  а  é  e  half  accent  two  E  <END>
EXPECTED = [0, 1, 1, 2, 2, 2, 3, 4, 5, 5, 6, 7, 8, 5, 9]


def test_compressed_ids_of_a_small_tokenizer(tmp_path):
    assert compressed_ids(small_tokenizer(tmp_path)) == EXPECTED


def test_compressed_ids_against_another_implementation(tmp_path):
    theirs = pytest.importorskip("b12x.sequence.engram.geometry").build_compressed_token_map
    small_tokenizer(tmp_path)

    class Wrapped:
        backend_tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))

        def __len__(self):
            return self.backend_tokenizer.get_vocab_size()

    assert theirs(Wrapped()) == (EXPECTED, 10)


def test_stored_ids_are_taken_as_they_are(tmp_path):
    with Checkpoint.open(write_golden_checkpoint(tmp_path / "golden")) as checkpoint:
        ids = load_compressed_ids(checkpoint, TINY)
    assert ids.dtype == torch.int64 and ids.tolist() == [(7 * token + 3) % 384 for token in range(512)]


def checkpoint_with(directory, ids=None, count=10):
    geometry = config()["text_config"] | {"engram_compressed_vocab_size": count}
    tensors = {"norm.weight": golden_tensors()["norm.weight"]} | ({} if ids is None else {COMPRESSED_IDS: ids})
    return Checkpoint.open(write_checkpoint(directory, tensors, geometry))


def small_geometry(count=10):
    from specdec_deepseek_v41.geometry import Geometry

    return Geometry.from_config(TINY.to_config() | {"engram_compressed_vocab_size": count})


def test_ids_are_built_from_the_tokenizer_beside_the_weights(tmp_path):
    with checkpoint_with(tmp_path) as checkpoint:
        with pytest.raises(CheckpointError, match="tokenizer"):
            load_compressed_ids(checkpoint, small_geometry())
        small_tokenizer(tmp_path)
        ids = load_compressed_ids(checkpoint, small_geometry()).tolist()
        # the padding token, whose text is that of a newline here, is number 2
        assert ids == EXPECTED + [EXPECTED[2]] * (512 - len(EXPECTED))
        with pytest.raises(CheckpointError, match=r"10 different ids from 0 to 9, .*engram_compressed_vocab_size = 11"):
            load_compressed_ids(checkpoint, small_geometry(11))


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.arange(10), "int64"),
        (torch.arange(10, dtype=torch.int32).reshape(2, 5), r"\[2, 5\]"),
        (torch.arange(2, dtype=torch.int32), "more than the padding token 2"),
        (torch.arange(513, dtype=torch.int32) % 10, "at most 512"),
        (torch.arange(11, dtype=torch.int32), "11 different ids from 0 to 10"),
        (torch.arange(10, dtype=torch.int32) + 1, "from 1 to 10"),
    ],
)
def test_stored_ids_that_do_not_fit_are_refused(tmp_path, ids, words):
    with checkpoint_with(tmp_path, ids) as checkpoint, pytest.raises(CheckpointError, match=words) as caught:
        load_compressed_ids(checkpoint, small_geometry())
    assert "\n" not in str(caught.value) and COMPRESSED_IDS in str(caught.value)
