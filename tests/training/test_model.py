"""The training form against independent implementations: transformers' class, plain recurrences, explicit rounds."""

import pytest
import torch
import torch.nn.functional as F


def tokens(count: int = 150, seed: int = 11) -> torch.Tensor:
    drawn = torch.randint(0, 512, (2, count), generator=torch.Generator().manual_seed(seed))
    drawn[0, [17, 18, count * 3 // 5]] = 500
    drawn[1, count - 1] = 500
    return drawn


@pytest.mark.parametrize(("budget", "select"), [(512, False), (16, True)])
def test_target_matches_transformers(random_parameters, budget, select):
    configuration = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    from plugins.qwen38.training.model import Model

    config, parameters = random_parameters
    config = {**config, "indexer_budget": budget}
    oracle_config = configuration.Qwen4ExpTextConfig(**config)
    oracle_config._attn_implementation = "eager"
    oracle = modeling.Qwen4ExpForCausalLM(oracle_config).eval().float()
    mine = Model(config, parameters)
    renamed = {
        name.replace("model.language_model.", "model."): value
        for name, value in mine.state_dict().items()
        if not name.startswith("mtp.")
    }
    missing, unexpected = oracle.load_state_dict(renamed, strict=False)
    assert not unexpected
    assert all(name.endswith(("multipliers", "vocab_sizes", "offsets")) for name in missing)
    with torch.no_grad():
        expected = oracle(tokens()).logits
        got, _, _ = mine.target(tokens(), select=select)
    assert expected.abs().max() > 2
    error = (got - expected).abs().amax(-1)
    if select:
        # transformers breaks ties among zero scores differently; rows without such a tie must agree.
        assert (error < 2e-5).float().mean() > 0.95
    else:
        assert error.max() <= 2e-5


def test_delta_rule_equals_recurrence(training_path):
    from plugins.qwen38.training.layers import delta_rule

    generator = torch.Generator().manual_seed(1)
    shape = (2, 75, 3)
    q, k = (F.normalize(torch.randn(*shape, 16, generator=generator, dtype=torch.float64), dim=-1) for _ in "qk")
    k[:, 20:60] = k[:, 20:21]  # repeated keys, the case where a careless inverse cancels
    v = torch.randn(*shape, 8, generator=generator, dtype=torch.float64)
    decay = -torch.rand(shape, generator=generator, dtype=torch.float64) * 0.1
    beta = torch.rand(shape, generator=generator, dtype=torch.float64)
    beta[:, 20:60] = 0.99
    inputs = [t.requires_grad_() for t in (q, k, v, decay, beta)]
    state, rows = torch.zeros(2, 3, 8, 16, dtype=torch.float64), []
    for t in range(shape[1]):
        state = state * decay[:, t].exp()[..., None, None]
        delta = beta[:, t].unsqueeze(-1) * (v[:, t] - (state @ k[:, t].unsqueeze(-1)).squeeze(-1))
        state = state + delta.unsqueeze(-1) * k[:, t].unsqueeze(-2)
        rows.append((state @ q[:, t].unsqueeze(-1)).squeeze(-1))
    expected = torch.stack(rows, 1)
    got = delta_rule(q, k, v, decay, beta, chunk=32)
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad((got * weight).sum(), inputs), torch.autograd.grad((expected * weight).sum(), inputs)
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("start", [0, 5, 20])
def test_chain_equals_an_explicit_round(random_parameters, start):
    """Depth k of the chain from row i is an ordinary causal layer over rows 0…i of real feedback and k−1 of its own."""
    from training.blocks import attend

    from plugins.qwen38.training import layers
    from plugins.qwen38.training.model import Model

    config, parameters = random_parameters
    model, prefix, text = Model(config, parameters), "mtp.layers.0.", tokens(40)
    with torch.no_grad():
        _, h, _ = model.target(text)
        drafts = list(model.chain(h, text, 5))
        get = model.get
        fuse = [
            get(f"mtp.{n}.weight") for n in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc_embedding", "fc_hidden")
        ]
        r = h[:, : start + 1]
        for depth in range(1, 6):
            read = F.embedding(text[:, 1 : start + depth + 1], get("model.language_model.embed_tokens.weight"))
            x = layers.feedback(r, read, *fuse, torch.float32)
            m, b = model.mix(prefix + "attn_hyper_connection.", x)
            q, k, v, gate = model.attention_inputs(prefix + "self_attn.", m)
            o = layers.attention_output(attend(q, k, v), gate, get(prefix + "self_attn.o_proj.weight"))
            y = model.experts(prefix, layers.combine(x, o, b), {})
            sampling, _ = model.mix("mtp.hyper_connection_mixer.", y[:, -1:], inject=False)
            expected = layers.linear(sampling, get("lm_head.weight"))[:, 0]
            torch.testing.assert_close(drafts[depth - 1][:, start], expected, atol=2e-5, rtol=0)
            r = torch.cat([r, y[:, -1:]], 1)


def test_selector_loss_reaches_only_the_selector(random_parameters):
    from plugins.qwen38.training.model import Model

    config, parameters = random_parameters
    model, keep = Model(config, parameters), {}
    _, h, statistics = model.target(tokens(40), keep=True)
    list(model.chain(h.detach(), tokens(40), 1, keep=keep))
    loss = sum(model.selector_loss(p, *kept) for p, kept in {**statistics["attention"], **keep}.items())
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    reached = {
        name for name, gradient in zip(parameters, gradients) if gradient is not None and gradient.abs().sum() > 0
    }
    assert reached and all(".indexer." in name for name in reached)
    assert len(reached) == 6
