"""The Qwen3.8 MTP layer composed from transformers' building blocks, run over whole sequences without any cache.

transformers has the target class only and drops ``mtp.*``; its decoder layer, norms and gated residual are the same modules
the MTP layer is made of. Row i pairs the residual h[i] with token x[i + 1] at position i.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from double_oracle import KeepDouble, double_model
from qwen_models import hf_model, lower_group_first, mtp_tensors
from torch import Tensor, nn
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf

from specdec_qwen38.geometry import TINY, Geometry


@frozen(kw_only=True, eq=False)
class MtpRows:
    """Rows of one pass. residual: [T, D], the layer's streams; vector: [T, H], after the mixer; logits: [T, V]."""

    residual: Tensor
    vector: Tensor
    logits: Tensor


class MtpOracle:
    """Target and MTP layer with the weights of ``write_random_checkpoint(seed)``, in float64; nothing is kept between calls."""

    def __init__(self, seed: int, geometry: Geometry = TINY) -> None:
        g = geometry
        self.geometry = g
        self.target = double_model(hf_model(seed, g))
        config = self.target.config
        self.layer = hf.Qwen4ExpTextDecoderLayer(config, g.attention_layers[0])
        self.mixer = hf.Qwen4ExpTextGatedResidual(config, use_combine=False)
        self.token_norm = hf.Qwen4ExpTextRMSNorm(g.hidden_size, eps=g.rms_norm_eps)
        # one group of all streams, unlike every other norm of that width
        self.residual_norm = hf.Qwen4ExpTextRMSNorm(g.streams_width, eps=g.rms_norm_eps)
        self.token_projection = nn.Linear(g.hidden_size, g.hidden_size, bias=False)
        self.residual_projection = nn.Linear(g.hidden_size, g.hidden_size, bias=False)
        homes = {
            "mtp.layers.0.": self.layer,
            "mtp.hyper_connection_mixer.": self.mixer,
            "mtp.pre_fc_norm_embedding.": self.token_norm,
            "mtp.pre_fc_norm_hidden.": self.residual_norm,
            "mtp.fc_embedding.": self.token_projection,
            "mtp.fc_hidden.": self.residual_projection,
        }
        tensors = mtp_tensors(seed, g)
        for prefix, module in homes.items():
            state = {name.removeprefix(prefix): tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
            module.load_state_dict(state)
            module.double().eval()
        assert not tensors, f"weights without a home: {sorted(tensors)}"

    def feedback(self, tokens: Tensor) -> Tensor:
        """Target residual h [T, D] after the last layer, before the final mixer, of a whole sequence [T]."""
        seen = []
        hook = self.target.model.layers[-1].register_forward_hook(lambda _module, _inputs, output: seen.append(output))
        with torch.inference_mode(), KeepDouble(), lower_group_first():
            self.target(tokens.unsqueeze(0))
        hook.remove()
        return seen[0][0]

    def fuse(self, residual: Tensor, tokens: Tensor) -> Tensor:
        """Input streams [T, D] of the layer: a projected residual per stream plus the projected token in each."""
        g = self.geometry
        streams = self.residual_norm(residual).view(-1, g.hc_count, g.hidden_size)
        token = self.token_projection(self.token_norm(self.target.model.embed_tokens(tokens)))
        return (self.residual_projection(streams) + token.unsqueeze(1)).flatten(1)

    def rows(self, residual: Tensor, tokens: Tensor) -> MtpRows:
        """Runs rows 0 … T−1. residual: [T, D]; tokens: [T], token i is the one after position i."""
        count = tokens.shape[0]
        with torch.inference_mode(), KeepDouble(), lower_group_first():
            streams = self.fuse(residual, tokens).unsqueeze(0)
            positions = torch.arange(count).view(1, 1, -1).expand(3, 1, -1)
            mask = torch.full((count, count), torch.finfo(streams.dtype).min, dtype=streams.dtype).triu(1)
            out = self.layer(
                streams,
                position_embeddings=self.target.model.rotary_emb(streams, positions),
                attention_mask=mask.view(1, 1, count, count),
            )[0]
            vector = self.mixer(out)
            return MtpRows(residual=out, vector=vector, logits=self.target.lm_head(vector))

    def proposals(
        self, residual: Tensor, tokens: Tensor, drafts: Sequence[int], *, repeat_vector: bool = False
    ) -> Tensor:
        """Logits [K, V] that draft K tokens after teacher-forced rows, if the drawn tokens are ``drafts`` (K of them).

        residual: [N, D]; tokens: [N]; the last row's token is the pending one. ``repeat_vector`` is a wrong recursion: the
        layer's collapsed vector in every stream instead of its residual.
        """
        logits = []
        for depth in range(len(drafts)):
            rows = self.rows(residual, tokens)
            logits.append(rows.logits[-1])
            carried = rows.vector[-1:].repeat(1, self.geometry.hc_count) if repeat_vector else rows.residual[-1:]
            residual = torch.cat([residual, carried])
            tokens = torch.cat([tokens, torch.tensor(drafts[depth : depth + 1])])
        return torch.stack(logits)
