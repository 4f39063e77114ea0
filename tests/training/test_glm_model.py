"""GLM's training form against independent implementations: transformers' classes, plain recurrences, explicit rounds."""

import copy

import pytest
import torch
import torch.nn.functional as F


def tokens(count: int = 90, seed: int = 11) -> torch.Tensor:
    return torch.randint(0, 512, (2, count), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def glm(training_path):
    """Five-layer parameters in which every feature matters: norms, mixing, gates and biases are all non-trivial."""
    from plugins.glm53.training.parameters import initialise, text_config

    config = text_config(5, budget=512)
    parameters = initialise(config, seed=3)
    generator = torch.Generator().manual_seed(5)
    for name, value in parameters.items():
        drawn = torch.randn(value.shape, generator=generator)
        if name.endswith("norm.weight"):
            value.data = 1 + 0.1 * drawn
        elif name.endswith("_base"):
            value.data = 0.5 * drawn
        elif name.endswith("_scale"):
            value.data = 0.5 + 0.5 * torch.rand(value.shape, generator=generator)
        elif name.endswith(("A_log", "ape")):
            value.data = 0.3 * drawn
        elif name.endswith("dt_bias"):
            value.data = drawn - 2
        elif name.endswith("bias"):
            value.data = 0.1 * drawn
        elif "conv1d" in name:
            value.data = 0.3 * drawn
        elif "embed" in name:
            value.data = drawn
        else:
            value.data = drawn / value.shape[-1] ** 0.5
    return config, parameters


def oracle_configuration(config: dict):
    configuration = pytest.importorskip("transformers.models.glm5_next.configuration_glm5_next")
    made = configuration.Glm5NextTextConfig(**config)
    made._attn_implementation = "eager"
    return made


def renamed(parameters, prefix: str = "model.language_model.") -> dict[str, torch.Tensor]:
    """Training names → transformers' names of the part below ``prefix``."""
    found, convolutions = {}, {}
    for name, value in parameters.items():
        if not name.startswith(prefix):
            continue
        name, value = name.removeprefix(prefix), value.detach()
        for site in ("attn", "ffn"):
            name = name.replace(f"hc_{site}_", f"{site}_hc.")
        for part in ("f_a_proj", "f_b_proj", "A_log", "dt_bias"):
            name = name.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
        if "_conv1d" in name:
            stem, part = name.split("self_attn.")
            convolutions.setdefault(stem + "self_attn.conv1d.weight", {})[part[0]] = value
        else:
            found[name] = value
    return found | {n: torch.cat([parts[p] for p in "qkv"]) for n, parts in convolutions.items()}


@pytest.mark.parametrize(("budget", "select"), [(512, False), (32, True)])
def test_target_matches_transformers(glm, budget, select):
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    from transformers import DynamicCache

    from plugins.glm53.training.model import Model

    config, parameters = glm
    config = {**config, "index_topk": budget}
    oracle_config = oracle_configuration(config)
    oracle = modeling.Glm5NextTextModel(oracle_config).eval().float()
    values = {n: v for n, v in renamed(parameters).items() if not n.startswith("layers.5.")}
    missing, unexpected = oracle.load_state_dict(values, strict=False)
    assert not missing and not unexpected
    with torch.no_grad():
        read = {"cache": DynamicCache(config=oracle_config), "use_cache": True}
        expected = oracle(tokens(), **read).last_hidden_state
        logits, h, _ = Model(config, parameters).target(tokens(), select=select)
    torch.testing.assert_close(h, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(logits, expected @ parameters["lm_head.weight"].T, atol=1e-3, rtol=0)
    if select:
        with torch.no_grad():
            dense = Model(config, parameters).target(tokens())[1]
        assert (dense - expected).abs().max() > 1e-2


def test_first_draft_depth_matches_the_composed_oracle(glm):
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    from transformers import DynamicCache

    from plugins.glm53.training.model import Model

    config, parameters = glm
    text, prefix = tokens(60), "model.language_model.layers.5."
    longer = {
        **config,
        "num_hidden_layers": 6,
        "layer_types": [*config["layer_types"], "deepseek_sparse_attention"],
        "mlp_layer_types": [*config["mlp_layer_types"], "sparse"],
        "indexer_types": ["full"] * 6,
    }
    layer_config = oracle_configuration(longer)
    values = renamed(parameters, prefix)

    def built(module, name):
        own = {n.removeprefix(name + "."): v for n, v in values.items() if n.startswith(name + ".")}
        module.load_state_dict(own)
        return module.eval().float()

    def norm(name):
        return built(modeling.Glm5NextTextRMSNorm(128, eps=1e-5), name)

    attention = built(modeling.Glm5NextTextAttention(layer_config, layer_idx=5), "self_attn")
    experts = built(modeling.Glm5NextTextMoE(layer_config), "mlp")
    with torch.no_grad():
        model = Model(config, parameters)
        _, h, _ = model.target(text)
        drafts = list(model.chain(h, text, 3))
        e = F.embedding(text[:, 1:], parameters["model.language_model.embed_tokens.weight"])
        z = F.linear(torch.cat([norm("enorm")(e), norm("hnorm")(h[:, :-1])], -1), values["eh_proj.weight"])
        mask = torch.ones(z.shape[:2], dtype=torch.bool)
        cache = DynamicCache(config=layer_config)
        read = {"attention_mask": mask, "cache": cache}
        r = z + attention(hidden_states=norm("input_layernorm")(z), **read)[0]
        r = r + experts(norm("post_attention_layernorm")(r))
        expected = norm("shared_head.norm")(r) @ parameters["lm_head.weight"].T
        torch.testing.assert_close(drafts[0][:, :-1], expected, atol=1e-4, rtol=0)
        # Depth two of row i: one more row after the i + 1 real ones, fed back with the normed output of row i.
        for row in (3, 20, 41):
            own = norm("shared_head.norm")(r)[:, row : row + 1]
            e = F.embedding(text[:, row + 2 : row + 3], parameters["model.language_model.embed_tokens.weight"])
            last = F.linear(torch.cat([norm("enorm")(e), norm("hnorm")(own)], -1), values["eh_proj.weight"])
            rows = torch.cat([z[:, : row + 1], last], 1)
            read = {"attention_mask": mask[:, : row + 2], "cache": DynamicCache(config=layer_config)}
            second = rows + attention(hidden_states=norm("input_layernorm")(rows), **read)[0]
            second = (second + experts(norm("post_attention_layernorm")(second)))[:, -1]
            second = norm("shared_head.norm")(second) @ parameters["lm_head.weight"].T
            torch.testing.assert_close(drafts[1][:, row], second, atol=1e-4, rtol=0)


@pytest.mark.parametrize("bound", [False, True])
def test_delta_rule_equals_recurrence(training_path, bound):
    from plugins.glm53.training.layers import delta_rule

    generator = torch.Generator().manual_seed(1)
    shape = (2, 75, 3)
    q, k = (F.normalize(torch.randn(*shape, 16, generator=generator, dtype=torch.float64), dim=-1) for _ in "qk")
    k[:, 20:60] = k[:, 20:21]  # repeated keys, the case where a careless inverse cancels
    v = torch.randn(*shape, 8, generator=generator, dtype=torch.float64)
    decay = -torch.rand(*shape, 16, generator=generator, dtype=torch.float64) * 0.1
    if bound:
        decay = torch.where(torch.rand(decay.shape, generator=generator) < 0.6, -5.0, decay)
    beta = torch.rand(shape, generator=generator, dtype=torch.float64)
    beta[:, 20:60] = 0.99
    inputs = [t.requires_grad_() for t in (q, k, v, decay, beta)]
    state, rows = torch.zeros(2, 3, 16, 8, dtype=torch.float64), []
    for t in range(shape[1]):
        state = state * decay[:, t].exp().unsqueeze(-1)
        delta = beta[:, t].unsqueeze(-1) * (v[:, t] - (state.mT @ k[:, t].unsqueeze(-1)).squeeze(-1))
        state = state + k[:, t].unsqueeze(-1) * delta.unsqueeze(-2)
        rows.append((state.mT @ q[:, t].unsqueeze(-1)).squeeze(-1))
    expected = torch.stack(rows, 1)
    got = delta_rule(q, k, v, decay, beta)
    torch.testing.assert_close(got, expected, atol=1e-11, rtol=0)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad((got * weight).sum(), inputs), torch.autograd.grad((expected * weight).sum(), inputs)
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-9, rtol=0)


def test_gradient_is_finite_at_the_bound_in_float32(training_path):
    """Every decay at its bound: products over a chunk reach e^−75, their factors e^±40."""
    from plugins.glm53.training.layers import delta_rule

    generator = torch.Generator().manual_seed(2)
    q, k = (F.normalize(torch.randn(1, 64, 2, 32, generator=generator), dim=-1) for _ in "qk")
    v, beta = torch.randn(1, 64, 2, 32, generator=generator), torch.rand(1, 64, 2, generator=generator)
    decay = torch.full((1, 64, 2, 32), -5.0)
    decay[..., ::2] = torch.rand(decay[..., ::2].shape, generator=generator) * -5
    exact = [t.double().requires_grad_() for t in (q, k, v, decay, beta)]
    inputs = [t.requires_grad_() for t in (q, k, v, decay, beta)]
    got, expected = delta_rule(*inputs), delta_rule(*exact, chunk=8)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=0)
    for mine, theirs in zip(
        torch.autograd.grad(got.square().sum(), inputs), torch.autograd.grad(expected.square().sum(), exact)
    ):
        assert mine.isfinite().all()
        torch.testing.assert_close(mine.double(), theirs, atol=1e-4, rtol=0)


def test_selector_loss_reaches_only_the_selector(glm):
    from plugins.glm53.training.model import Model

    config, parameters = glm
    model, keep = Model(config, parameters), {}
    _, h, statistics = model.target(tokens(40), keep=True)
    list(model.chain(h.detach(), tokens(40), 1, keep=keep))
    loss = sum(model.selector_loss(p, *kept) for p, kept in {**statistics["attention"], **keep}.items())
    trained = {n: p for n, p in parameters.items() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    reached = {n for n, g in zip(trained, gradients) if g is not None and g.abs().sum() > 0}
    assert reached and all(".indexer." in name for name in reached)
    assert len(reached) == 2 * 7


def test_router_bias_moves_towards_equal_loads(glm):
    from plugins.glm53.training.model import Model

    config, parameters = glm[0], {n: torch.nn.Parameter(v.clone(), v.requires_grad) for n, v in glm[1].items()}
    model = Model(config, parameters)
    name = "model.language_model.layers.4.mlp.gate.e_score_correction_bias"
    loads = []
    with torch.no_grad():
        for _ in range(60):
            statistics = model.target(tokens())[2]
            loads.append(statistics["load"][name][0])
            model.rebalance({"target": statistics}, 0.02)
    assert (loads[-1] - 1 / 3).abs().max() < 0.5 * (loads[0] - 1 / 3).abs().max()
    assert copy.deepcopy(parameters[name]).grad is None
