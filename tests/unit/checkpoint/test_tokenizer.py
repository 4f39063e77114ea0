"""Encoding, decoding and the incremental decoder, on a byte-level BPE trained here."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from specdec.checkpoint.tokenizer import Tokenizer
from specdec.errors import CheckpointError

CORPUS = ["def add(first, second):\n    return first + second\n", "Grüße aus Köln, 你好世界 🙂🙃 naïve café"] * 20
REPLACEMENT = "\ufffd"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    path = tmp_path_factory.mktemp("tokenizer")
    library.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def token_of_byte(directory):
    """The id of each single byte, from the published byte-to-character table of byte-level BPE."""
    vocabulary = json.loads((directory / "tokenizer.json").read_text())["model"]["vocab"]
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {byte: vocabulary[letter] for byte, letter in letters.items()}


def streamed(tokenizer, ids, **options):
    stream = tokenizer.stream(**options)
    pieces = [stream.push([token]) for token in ids]
    return pieces, stream.finish()


@pytest.mark.parametrize("text", ["", "x", "def f(a):\n\treturn a", "Grüße 你好 🙂", "🙃" * 7, "  spaces  "])
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    pieces, rest = streamed(tokenizer, ids)
    assert "".join(pieces) + rest == text and rest == ""


def test_special_tokens(tokenizer):
    end = tokenizer.token_id("<|end|>")
    assert end is not None and tokenizer.token_id("<|missing|>") is None
    assert tokenizer.vocab_size == 300
    ids = [*tokenizer.encode("ab"), end, *tokenizer.encode("cd")]
    assert tokenizer.decode(ids) == "abcd"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab<|end|>cd"
    assert "".join(streamed(tokenizer, ids)[0]) == "abcd"
    assert "".join(streamed(tokenizer, ids, skip_special_tokens=False)[0]) == "ab<|end|>cd"


def test_a_character_split_over_four_tokens_appears_whole(tokenizer, token_of_byte):
    ids = [token_of_byte[byte] for byte in "a🙂b€".encode()]
    pieces, rest = streamed(tokenizer, ids)
    assert pieces == ["a", "", "", "", "🙂", "b", "", "", "€"] and rest == ""


def test_text_before_an_incomplete_character_is_not_held_back(tokenizer, token_of_byte):
    euro = [token_of_byte[byte] for byte in "€".encode()]
    stream = tokenizer.stream()
    assert stream.push([token_of_byte[ord("x")], euro[0]]) == "x"
    assert stream.push([euro[1]]) == ""
    assert stream.push([euro[2], euro[0]]) == "€"
    assert stream.finish() == REPLACEMENT
    assert stream.push([token_of_byte[ord("y")]]) == "y"  # finish leaves a fresh stream


def test_long_chains_that_never_end_on_a_character(tokenizer, token_of_byte):
    """Each push ends one character and begins the next, so no call ends cleanly."""
    text = "你好世界€" * 30
    raw = text.encode()
    stream = tokenizer.stream()
    out = stream.push([token_of_byte[raw[0]]])
    for begin in range(1, len(raw), 3):
        out += stream.push([token_of_byte[byte] for byte in raw[begin : begin + 3]])
        assert REPLACEMENT not in out
    assert out + stream.finish() == text


def test_broken_bytes_are_replaced_and_bounded(tokenizer, token_of_byte):
    ids = [token_of_byte[0x82]] * 1000
    pieces, rest = streamed(tokenizer, ids)
    assert "".join(pieces) + rest == tokenizer.decode(ids) == REPLACEMENT * 1000
    pieces, rest = streamed(tokenizer, [token_of_byte[byte] for byte in b"\xe2\x82x\xff\xf0\x9f"])
    assert "".join(pieces) + rest == b"\xe2\x82x\xff\xf0\x9f".decode(errors="replace")


@settings(max_examples=150, deadline=None)
@given(raw=st.one_of(st.text(max_size=20).map(str.encode), st.binary(max_size=40)), cuts=st.lists(st.integers(1, 4)))
def test_pieces_join_to_the_whole_and_are_final(tokenizer, token_of_byte, raw, cuts):
    ids = [token_of_byte[byte] for byte in raw]
    whole = raw.decode(errors="replace")
    stream, out, position = tokenizer.stream(), "", 0
    for cut in [*cuts, len(ids) + 1]:
        out += stream.push(ids[position : position + cut])
        position += cut
        assert whole.startswith(out)
    assert out + stream.finish() == whole


def test_missing_or_broken_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a usable tokenizer") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)
