"""Random Qwen3.8 models of the tiny geometry: an oracle from transformers, the same weights as a checkpoint, prepared objects.

The initialisation makes every state visible: convolution and n-gram weights are not zero, norms are away from one.
"""

from __future__ import annotations

from collections import namedtuple
from contextlib import contextmanager
from pathlib import Path

import torch
from prepared import Prepared

from specdec.checkpoint.reader import Checkpoint
from specdec.checkpoint.writer import write_checkpoint
from specdec.interfaces import Capacities
from specdec.round.arena import Arena
from specdec_qwen38.drafter import MtpDrafter
from specdec_qwen38.geometry import TINY, Geometry
from specdec_qwen38.inventory import target_inventory
from specdec_qwen38.recipe import RECIPE
from specdec_qwen38.target import QwenTarget

tuple_of_topk = namedtuple("tuple_of_topk", ("values", "indices"))


def _normal(generator: torch.Generator, shape: tuple[int, ...], std: float) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64) * std


def random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A float64 tensor with the spread its name asks for."""
    if name.endswith(("A_log", "dt_bias")):
        return torch.rand(shape, generator=generator, dtype=torch.float64)
    if name.endswith("linear_attn.norm.weight"):
        return torch.ones(shape, dtype=torch.float64)
    if "conv1d" in name:
        return _normal(generator, shape, 0.3)
    if "embed_tokens" in name or "ngram_embedding" in name:
        return _normal(generator, shape, 1.0)
    if len(shape) == 1:
        return _normal(generator, shape, 0.2)
    return _normal(generator, shape, 0.12)


def hf_config(geometry: Geometry = TINY):
    """Configuration of transformers' text class for a geometry."""
    from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig

    values = geometry.to_config()
    rope = dict(values.pop("rope_parameters"), mrope_section=[2, 1, 1], mrope_interleaved=True)
    config = Qwen4ExpTextConfig(**values, rope_parameters=rope)
    config._attn_implementation = "eager"
    return config


def random_tensors(seed: int, geometry: Geometry = TINY) -> dict[str, torch.Tensor]:
    """Float32 weights of target and drafter under their checkpoint names, target experts fused, n-gram table in shards."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for spec in target_inventory(geometry, experts="bfloat16_fused", ple="bfloat16").expand():
        if spec.dtype != "int64":
            tensors[spec.name] = random_weight(spec.name, spec.shape, generator).to(torch.float32)
    return {**tensors, **mtp_tensors(seed, geometry)}


def hf_model(seed: int, geometry: Geometry = TINY, dtype: torch.dtype = torch.float32):
    """The transformers class with the weights of ``random_tensors``."""
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

    model = Qwen4ExpForCausalLM(hf_config(geometry))
    ours = random_tensors(seed, geometry)
    state = dict(model.state_dict())
    for name in state:
        stored = name.replace("model.", "model.language_model.", 1)
        if stored in ours:
            state[name] = ours[stored]
        elif stored.endswith("ngram_embedding.weight"):
            base = stored.removesuffix("weight")
            state[name] = torch.cat([ours[f"{base}shard_{i}.weight"] for i in range(geometry.split_ngram_parts)])
        elif state[name].dtype.is_floating_point:
            raise AssertionError(f"no weight for {name}")
    model.load_state_dict(state)
    return model.to(dtype).eval()


@contextmanager
def lower_group_first():
    """Ties in the oracle's selection take the lower group, as ours do; the class itself leaves them to ``topk``.

    Exact ties are common: a group's score is zero whenever every selector head's product is negative.
    """
    original = torch.Tensor.topk

    def stable(self, k, dim=-1, **_):
        return tuple_of_topk(*(t.narrow(dim, 0, k) for t in self.sort(dim=dim, descending=True, stable=True)))

    torch.Tensor.topk = stable
    try:
        yield
    finally:
        torch.Tensor.topk = original


def mtp_tensors(seed: int, geometry: Geometry = TINY) -> dict[str, torch.Tensor]:
    """Random drafter weights, experts fused and unquantised."""
    g = geometry
    hidden, wide, rank = g.hidden_size, g.streams_width, g.hc_lowrank
    inner, shared = g.moe_intermediate_size, g.shared_expert_intermediate_size
    layer = "mtp.layers.0."
    shapes: dict[str, tuple[int, ...]] = {
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (wide,),
        "mtp.fc_embedding.weight": (hidden, hidden),
        "mtp.fc_hidden.weight": (hidden, hidden),
        layer + "self_attn.q_proj.weight": (2 * g.query_width, hidden),
        layer + "self_attn.k_proj.weight": (g.kv_width, hidden),
        layer + "self_attn.v_proj.weight": (g.kv_width, hidden),
        layer + "self_attn.o_proj.weight": (hidden, g.query_width),
        layer + "self_attn.q_norm.weight": (g.head_dim,),
        layer + "self_attn.k_norm.weight": (g.head_dim,),
        layer + "self_attn.indexer.index_qk_proj.weight": (g.index_width, hidden),
        layer + "self_attn.indexer.q_layernorm.weight": (g.indexer_head_dim,),
        layer + "self_attn.indexer.k_layernorm.weight": (g.indexer_head_dim,),
        layer + "mlp.gate.weight": (g.num_experts, hidden),
        layer + "mlp.experts.gate_up_proj": (g.num_experts, 2 * inner, hidden),
        layer + "mlp.experts.down_proj": (g.num_experts, hidden, inner),
        layer + "mlp.shared_expert.gate_proj.weight": (shared, hidden),
        layer + "mlp.shared_expert.up_proj.weight": (shared, hidden),
        layer + "mlp.shared_expert.down_proj.weight": (hidden, shared),
        layer + "mlp.shared_expert_gate.weight": (1, hidden),
    }
    for mixer in ("mtp.hyper_connection_mixer.", layer + "attn_hyper_connection.", layer + "mlp_hyper_connection."):
        shapes[mixer + "hc_norm.weight"] = (wide,)
        shapes[mixer + "input_mix_weight_down.weight"] = (rank, wide)
        shapes[mixer + "input_mix_weight_up.weight"] = (wide, rank)
        if mixer.startswith(layer):
            shapes[mixer + "block_inject_weight.weight"] = (g.hc_count, wide)
    generator = torch.Generator().manual_seed(seed + 1000)
    return {name: random_weight(name, shape, generator).to(torch.float32) for name, shape in sorted(shapes.items())}


def write_random_checkpoint(directory: Path, seed: int, geometry: Geometry = TINY) -> Path:
    """Float32 checkpoint of ``random_tensors(seed)``."""
    return write_checkpoint(
        directory, random_tensors(seed, geometry), {"model_type": "qwen4_exp", "text_config": geometry.to_config()}
    )


def prepare(
    directory: Path,
    *,
    dtype: str = "float32",
    slots: int = 4,
    context: int = 192,
    device: str = "cpu",
    recurrence="records",
) -> Prepared:
    """Loads target and drafter for ``slots`` requests with private pages for a full context each."""
    reach = -(-(context + 8) // 64)
    capacities = Capacities(
        slots=slots, context=context, pages=slots * reach, max_draft_tokens=7, dtype=dtype, prefill_rows=context
    )
    with Checkpoint.open(directory) as checkpoint:
        where = torch.device(device)
        target = QwenTarget(checkpoint, Geometry.from_config(checkpoint.config), capacities, where, recurrence)
        drafter = MtpDrafter.load(recipe=RECIPE, checkpoint=checkpoint, target=target, capacities=capacities)
    arena = Arena(
        slots=slots, max_draft_tokens=7, stop_ids=4, device=where, extended=True, vocab_size=target.vocab_size
    )
    return Prepared(target=target, drafter=drafter, arena=arena, capacities=capacities)
