"""The GGUF file as a checkpoint: settings, tensors and text against what transformers reads, and files that are refused."""

import json

import gguf
import numpy
import pytest
import torch
from attrs import evolve
from safetensors.torch import save_file

from specdec.checkpoint.accepted import open_checkpoint
from specdec.checkpoint.inspect import inspect_checkpoint
from specdec.errors import CheckpointError
from specdec_smollm2.geometry import REAL, Geometry
from specdec_smollm2.gguf_checkpoint import open_llama

TEXTS = (
    "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
    "x_12 = 3.14159e-10 + 0xFF * 1_000_000  # 2024-11-30",
    "<|im_start|>user\nIt's <b>bold</b>, isn't it?<|im_end|>\n<|im_start|>assistant\n",
    "naïve café, Größe, 日本語のテキスト, Привет, 🙂🙃\u200d",
    "  leading   and trailing \t spaces \n\n\n  ",
    "<|im_start|><|im_end|><|endoftext|><repo_name>a/b<file_sep>",
    "Don't we'll they've I'd 'quoted' \"double\" -- ... !!! 100% $5",
)


def test_settings(checkpoint):
    found = Geometry.from_config(checkpoint.config)
    assert found.rms_norm_eps == pytest.approx(REAL.rms_norm_eps, rel=1e-7)  # the file has it in single precision
    assert evolve(found, rms_norm_eps=REAL.rms_norm_eps) == REAL
    assert checkpoint.config["model_type"] == "llama"
    assert checkpoint.generation_config() == {"eos_token_id": 2}
    special = checkpoint.tokenizer_config()
    assert (special["bos_token"], special["eos_token"]) == ("<|im_start|>", "<|im_end|>")
    assert "add_generation_prompt" in special["chat_template"]


def test_tensors_are_those_that_transformers_reads(checkpoint, independent, recipe):
    """All 272, to the bit: names, shapes, decoded blocks and the order of query and key rows."""
    assert inspect_checkpoint(checkpoint, recipe).ok
    theirs = independent.state_dict()
    assert len(checkpoint.names) == 272
    for name in checkpoint.names:
        ours = checkpoint.load(name)
        assert ours.shape == checkpoint.spec(name).shape
        assert torch.equal(ours, theirs[name]), name


def test_known_encodings(tokenizer):
    """Digits stand alone, words take the space before them, special tokens are one id, bytes come back."""
    assert tokenizer.vocab_size == 49152
    assert tokenizer.token_id("<|im_start|>") == 1
    assert tokenizer.token_id("<|im_end|>") == 2
    for number in range(10):
        assert tokenizer.encode(str(number)) == [32 + number]
    assert tokenizer.encode("2024") == [34, 32, 34, 36]
    assert tokenizer.encode("a b") == [tokenizer.token_id("a"), tokenizer.token_id("Ġb")]
    assert tokenizer.encode("<|im_start|>user\n<|im_end|>")[::3] == [1, 2]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.decode([1, *tokenizer.encode("x")]) == "x"


def test_encodings_are_those_of_transformers(tokenizer, path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False), text


def write(path, *, architecture="llama", pre="smollm", extra=(), metadata=(), key_heads=1):
    """A GGUF file of a tiny model of one layer."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    if key_heads is not None:
        writer.add_head_count_kv(key_heads)
    writer.add_rope_dimension_count(4)
    writer.add_rope_freq_base(10_000.0)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["a", "b", "ab", "<s>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(3)
    for name, value in metadata:
        writer.add_string(name, value)
    keys = (4 * (key_heads or 2), 8)
    shapes = {"token_embd": (4, 8), "output_norm": (8,), "blk.0.attn_q": (8, 8), "blk.0.attn_k": keys}
    for number, (name, shape) in enumerate([*shapes.items(), *extra]):
        values = numpy.arange(numpy.prod(shape), dtype=numpy.float32).reshape(shape) + 1000 * number
        writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_rows_of_queries_and_keys_become_halves(tmp_path):
    """Pairs (0, 1), (2, 3) of a head become rows 0, 2 and then 1, 3."""
    with open_llama(write(tmp_path / "tiny.gguf")) as checkpoint:
        rows = checkpoint.load("model.layers.0.self_attn.q_proj.weight")[:, 0].sub(2000).div(8)
        assert rows.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
        rows = checkpoint.load("model.layers.0.self_attn.k_proj.weight")[:, 0].sub(3000).div(8)
        assert rows.tolist() == [0, 2, 1, 3]
        assert checkpoint.load("model.embed_tokens.weight")[1, 0] == 8
        assert checkpoint.config["tie_word_embeddings"] is True
        assert checkpoint.tokenizer().encode("ab<s>a") == [2, 3, 0]
        assert checkpoint.tokenizer_config() == {"eos_token": "<s>"}
    with open_llama(write(tmp_path / "every-head.gguf", key_heads=None)) as checkpoint:
        rows = checkpoint.load("model.layers.0.self_attn.k_proj.weight")[:, 0].sub(3000).div(8)
        assert rows.tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    with open_llama(write(tmp_path / "untied.gguf", extra=[("output", (4, 8))])) as checkpoint:
        assert checkpoint.config["tie_word_embeddings"] is False
        assert checkpoint.load("lm_head.weight").shape == (4, 8)


def test_a_folder_of_safetensors_opens_too(tmp_path):
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with open_llama(tmp_path) as checkpoint:
        assert checkpoint.names == ("model.norm.weight",)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"architecture": "mamba"}, "general.architecture is 'mamba', allowed: 'llama'"),
        ({"extra": [("rope_freqs", (2,))]}, "tensor rope_freqs.weight has no place in a plain Llama"),
        ({"extra": [("blk.0.ffn_gate_inp", (2,))]}, "tensor blk.0.ffn_gate_inp.weight has no place"),
        ({"metadata": [("llama.rope.scaling.type", "yarn")]}, "llama.rope.scaling.type is 'yarn', allowed: 'none'"),
    ],
)
def test_models_without_an_implementation_are_refused(tmp_path, options, words):
    with pytest.raises(CheckpointError) as caught:
        open_llama(write(tmp_path / "other.gguf", **options))
    assert words in str(caught.value)
    assert "other.gguf" in str(caught.value)


def test_other_ways_to_cut_text_are_refused(tmp_path):
    with (
        open_llama(write(tmp_path / "tiny.gguf", pre="llama-bpe")) as checkpoint,
        pytest.raises(CheckpointError) as caught,
    ):
        checkpoint.tokenizer()
    assert "tokenizer.ggml.pre is 'llama-bpe', allowed: 'smollm'" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all, but text that is long enough"])
def test_files_that_are_no_gguf(tmp_path, recipe, content):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"x\.gguf: not a readable GGUF file"):
        open_checkpoint(recipe, tmp_path / "x.gguf")
    with pytest.raises(CheckpointError, match=r"y\.gguf: cannot be read: No such file"):
        open_checkpoint(recipe, tmp_path / "y.gguf")


def test_a_file_that_is_cut_off(tmp_path, recipe):
    whole = write(tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) - 64])
    with pytest.raises(CheckpointError, match=r"cut\.gguf: not a readable GGUF file"):
        open_checkpoint(recipe, tmp_path / "cut.gguf")
