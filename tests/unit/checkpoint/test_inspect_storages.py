"""``specdec inspect`` and the loader agree: on every form in which a release stores this model, and on damage to it.

The forms are derived from the official one by hand. Payloads are zeros, which load like any other weights.
"""

import json
from math import prod

import pytest
import torch
from sparse_checkpoint import entries, write_sparse

from specdec.checkpoint import Checkpoint
from specdec.checkpoint.inspect import inspect_checkpoint
from specdec.cli.main import main
from specdec.errors import CheckpointError
from specdec.interfaces import Capacities
from specdec_qwen38.drafter import MtpDrafter
from specdec_qwen38.geometry import REAL, TINY
from specdec_qwen38.inventory import mtp_inventory, target_inventory
from specdec_qwen38.recipe import RECIPE
from specdec_qwen38.target import QwenTarget

SIZES = {"bfloat16": 2, "float32": 4, "uint8": 1, "float8_e4m3fn": 1}
OFFICIAL = "model.language_model."
TABLE = OFFICIAL + "layers.1.ple.ple_embedding."
VISION = [("model.visual.blocks.0.attn.qkv.weight", (3456, 1152), "bfloat16", 7_962_624)]


def tensor(name, shape, dtype):
    return name, tuple(shape), dtype, prod(shape) * SIZES[dtype]


def is_expert(name):
    return ".mlp.experts." in name


def official(geometry):
    return entries(target_inventory(geometry)) + entries(mtp_inventory(geometry))


def renamed(tensors, prefix, head="lm_head."):
    """Another exporter's prefixes."""
    found = []
    for name, *rest in tensors:
        name = prefix + name.removeprefix(OFFICIAL) if name.startswith(OFFICIAL) else name
        found.append((head + name.removeprefix("lm_head.") if name.startswith("lm_head.") else name, *rest))
    return found


def by_expert(tensors, where, store):
    """Routed experts with ``where`` in their name stored by ``store``: (name, out, in) → tensors."""
    found = []
    for name, shape, dtype, size in tensors:
        if not is_expert(name) or where not in name:
            found.append((name, shape, dtype, size))
        elif name.endswith(".weight"):
            found += store(name, shape[0], shape[1] * 2)
    return found


def plain(dtype):
    return lambda name, out, width: [tensor(name, (out, width), dtype)]


def fp8(name, out, width):
    return [tensor(name, (out, width), "float8_e4m3fn"), tensor(f"{name}_scale", (), "float32")]


def fp8_128(name, out, width):
    blocks = (-(-out // 128), -(-width // 128))
    return [tensor(name, (out, width), "float8_e4m3fn"), tensor(f"{name}_scale_inv", blocks, "bfloat16")]


def mxfp8(name, out, width):
    return [tensor(name, (out, width), "float8_e4m3fn"), tensor(f"{name}_scale", (out, width // 32), "uint8")]


def matrices(tensors, words, store):
    """BF16 matrices whose name contains one of ``words`` stored by ``store``."""
    found = []
    for name, shape, dtype, size in tensors:
        chosen = any(word in name for word in words) and dtype == "bfloat16" and len(shape) == 2
        found += store(name, *shape) if chosen else [(name, shape, dtype, size)]
    return found


def fused(tensors, geometry):
    """Experts of a layer in two tensors, as in the BF16 release."""
    count, hidden, inner = geometry.num_experts, geometry.hidden_size, geometry.moe_intermediate_size
    layers = sorted({name.partition("experts.")[0] + "experts." for name, *_ in tensors if is_expert(name)})
    found = [entry for entry in tensors if not is_expert(entry[0])]
    for layer in layers:
        found.append(tensor(layer + "gate_up_proj", (count, 2 * inner, hidden), "bfloat16"))
        found.append(tensor(layer + "down_proj", (count, hidden, inner), "bfloat16"))
    return found


def with_dtype(tensors, stored, dtype):
    return [
        tensor(name, shape, dtype) if kind == stored else (name, shape, kind, n) for name, shape, kind, n in tensors
    ]


def bfloat16_release(geometry):
    plain_table = [entry for entry in fused(official(geometry), geometry) if not entry[0].endswith("weight_scale")]
    return with_dtype(plain_table, "float8_e4m3fn", "bfloat16")


def whole_table(geometry):
    """The table as one tensor, without the vectors that follow from the configuration."""
    kept = [entry for entry in bfloat16_release(geometry) if not entry[0].startswith(TABLE)]
    shape = (geometry.ple_table_rows(), geometry.ngram_head_dim)
    return [*kept, tensor(TABLE + "ngram_embedding.weight", shape, "bfloat16")]


def without_input_scale(geometry):
    return [entry for entry in official(geometry) if not entry[0].endswith("input_scale")]


FORMS = {
    "official": official,
    "re-export under language_model.model": lambda g: renamed(
        official(g), "language_model.model.", "language_model.lm_head."
    ),
    "re-export under model": lambda g: renamed(official(g), "model."),
    "BF16 release": bfloat16_release,
    "BF16 release under model": lambda g: renamed(bfloat16_release(g), "model."),
    "float32": lambda g: with_dtype(bfloat16_release(g), "bfloat16", "float32"),
    "BF16 by expert": lambda g: by_expert(official(g), "", plain("bfloat16")),
    "table in one tensor": whole_table,
    "W4A16": without_input_scale,
    "MTP experts in FP8 blocks": lambda g: by_expert(official(g), "mtp.", fp8_128),
    "experts in FP8": lambda g: by_expert(official(g), "", fp8),
    "projections in MXFP8": lambda g: matrices(official(g), ("linear_attn.", "self_attn.", "shared_expert."), mxfp8),
    "everything dense in FP8 blocks": lambda g: matrices(official(g), (".",), fp8_128),
}


def hash_constants(geometry):
    values = {
        "layer_multipliers": geometry.ple_multipliers(),
        "ngram_heads_vocab_sizes": geometry.ple_primes(),
        "ngram_heads_offsets": geometry.ple_offsets(),
    }
    return {TABLE + name: b"".join(value.to_bytes(8, "little") for value in row) for name, row in values.items()}


def write(directory, tensors, geometry=TINY):
    payloads = hash_constants(geometry)
    for name, *_ in tensors:
        for constant in tuple(payloads):
            if name.endswith(constant.removeprefix(OFFICIAL)):
                payloads[name] = payloads[constant]
    write_sparse(directory, [tensors], {"model_type": "qwen4_exp", "text_config": geometry.to_config()}, payloads)
    return directory


def loads(directory):
    """Whether target and drafter can be built."""
    capacities = Capacities(slots=1, context=64, pages=2, max_draft_tokens=7, dtype="float32", prefill_rows=16)
    with Checkpoint.open(directory) as checkpoint, torch.inference_mode():
        try:
            target = QwenTarget.build(
                recipe=RECIPE, checkpoint=checkpoint, capacities=capacities, device=torch.device("cpu")
            )
            MtpDrafter.load(recipe=RECIPE, checkpoint=checkpoint, target=target, capacities=capacities)
        except CheckpointError:
            return False
    return True


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param](TINY)


def test_what_loads_is_ok(tmp_path, form, capsys):
    directory = write(tmp_path / "model", [*form, *VISION])
    assert loads(directory)
    assert main(["inspect", str(directory), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    parts = data["parts"].values()
    assert all(part["found_count"] == part["expected_count"] for part in parts)
    assert all(part["found_bytes"] == part["expected_bytes"] for part in parts)
    assert sum(part["found_count"] for part in parts) == len(form)
    assert sum(part["found_bytes"] for part in parts) == sum(size for *_, size in form)
    assert data["other"] == {"count": 1, "bytes": 7_962_624}


DAMAGED = [
    "lm_head.weight",
    "layers.0.linear_attn.out_proj.weight",
    "layers.3.self_attn.indexer.index_qk_proj.weight",
    "layers.2.mlp.gate.weight",
    "mtp.fc_hidden.weight",
    "mtp.layers.0.self_attn.o_proj.weight",
    "layers.1.ple.value_proj.weight",
]


@pytest.mark.parametrize("ending", DAMAGED)
def test_a_missing_or_misshapen_tensor_differs_in_every_form(tmp_path, form, ending):
    (index,) = [number for number, entry in enumerate(form) if entry[0].endswith(ending)]
    name, shape, dtype, size = form[index]
    rest = form[:index] + form[index + 1 :]
    for number, tensors in enumerate((rest, [*rest, (name, (shape[0], *shape[:0:-1], 1), dtype, size)])):
        directory = write(tmp_path / str(number), tensors)
        assert not loads(directory)
        with Checkpoint.open(directory) as checkpoint:
            result = inspect_checkpoint(checkpoint, RECIPE)
        wrong, right = sorted(result.parts, key=lambda part: part.validation.ok)
        assert not wrong.validation.ok and right.validation.ok
        assert wrong.name == ("drafter" if name.startswith("mtp.") else "target")
        listed = wrong.validation.mismatched if number else wrong.validation.missing
        assert len(listed) == 1 and ending in listed[0]


EXPERTS = [
    "layers.2.mlp.experts.7.up_proj.",
    "mtp.layers.0.mlp.experts.15.down_proj.",
    "layers.2.mlp.experts.down_proj",
]


def test_a_missing_tensor_of_one_expert_differs_in_every_form(tmp_path, form):
    chosen = [entry for entry in form if any(part in entry[0] for part in EXPERTS) and "input_scale" not in entry[0]]
    assert chosen
    for number, entry in enumerate(chosen):
        directory = write(tmp_path / str(number), [other for other in form if other is not entry])
        assert not loads(directory)
        with Checkpoint.open(directory) as checkpoint:
            assert not inspect_checkpoint(checkpoint, RECIPE).ok


def test_a_scale_of_a_plain_weight_is_unexpected(tmp_path):
    name = "mtp.fc_hidden.weight_scale"
    directory = write(tmp_path / "model", [*official(TINY), (name, (), "float32", 4)])
    assert not loads(directory)
    with Checkpoint.open(directory) as checkpoint:
        target, drafter = inspect_checkpoint(checkpoint, RECIPE).parts
    assert target.validation.ok and drafter.validation.unexpected == (name,)


def test_two_names_of_one_tensor_are_refused(tmp_path, capsys):
    twice = [*official(TINY), tensor("model.embed_tokens.weight", (512, 128), "bfloat16")]
    assert main(["inspect", str(write(tmp_path / "model", twice))]) == 4
    line = capsys.readouterr().err
    assert "model.embed_tokens.weight was already found as model.language_model.embed_tokens.weight" in line


@pytest.mark.parametrize(
    ("form", "counts"),
    [
        # published: 31 MTP tensors of the BF16 release and 3,101 of the NVFP4 release whose MTP experts are FP8 blocks
        ("BF16 release", (1_067 + 2 * 48 + 128 + 3, 31)),
        ("MTP experts in FP8 blocks", (296_111, 3_101)),
    ],
)
def test_published_counts_at_full_size(tmp_path, form, counts):
    directory = write(tmp_path / "model", FORMS[form](REAL), REAL)
    with Checkpoint.open(directory) as checkpoint:
        result = inspect_checkpoint(checkpoint, RECIPE)
    assert result.ok and result.other_count == 0
    assert tuple(part.validation.found_count for part in result.parts) == counts
