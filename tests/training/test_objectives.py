"""The sampling law, the acceptance measure and the orthogonalised update against direct definitions."""

import torch


def test_lawful_is_top_k_then_top_p(training_path):
    from training.objectives import lawful

    logits = torch.randn(50, 64, generator=torch.Generator().manual_seed(4)) * 3
    got = lawful(logits, top_k=8, top_p=0.9)
    for row, result in zip(logits.double(), got.double()):
        p = torch.softmax(row, 0)
        order = p.argsort(descending=True)[:8]
        kept, total = [], 0.0
        for index in order.tolist():
            if total >= 0.9:
                break
            kept.append(index)
            total += float(p[index] / p[order].sum())
        expected = torch.zeros(64, dtype=torch.float64)
        expected[kept] = p[kept] / p[kept].sum()
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)


def test_depth_terms_compare_the_rows_that_meet(training_path):
    from training.objectives import Objectives, lawful

    generator = torch.Generator().manual_seed(6)
    depth_terms = Objectives(None, 0.95).depth_terms
    target = torch.randn(1, 12, 32, generator=generator)
    draft = target.roll(-3, 1)  # a perfect drafter of depth 3
    kl, accepted = depth_terms(target, draft, lawful(target), 3)
    assert kl.shape == accepted.shape == (1, 9)
    torch.testing.assert_close(accepted, torch.ones(1, 9))
    assert kl.abs().max() < 1e-6
    assert depth_terms(target, draft, lawful(target), 2)[1].mean() < 0.9


def test_orthogonalise_evens_out_singular_values(training_path):
    from training.optimiser import orthogonalise

    drawn = torch.randn(3, 48, 20, generator=torch.Generator().manual_seed(8))
    values = torch.linalg.svdvals(orthogonalise(drawn))
    assert values.min() > 0.5 and values.max() < 1.4


def test_optimisers_reduce_a_loss(training_path):
    from training.optimiser import Optimiser

    generator = torch.Generator().manual_seed(8)
    named = {n: torch.nn.Parameter(torch.randn(8, 8, generator=generator)) for n in ("first", "second")}
    optimiser = Optimiser(named, {"first": "muon", "second": "adam"}, 0.05, 0.01, 4)
    read = torch.randn(64, 8, generator=generator)
    losses = []
    for _ in range(60):
        loss = (read @ named["first"].T @ named["second"].T - read).square().mean()
        loss.backward()
        optimiser.step(1.0)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.3 * losses[0]


def test_lawful_without_top_k_is_top_p(training_path):
    from training.objectives import lawful

    logits = torch.randn(50, 64, generator=torch.Generator().manual_seed(9)) * 3
    got = lawful(logits, top_p=0.95)
    for row, result in zip(logits.double(), got.double()):
        p = torch.softmax(row, 0)
        kept, total = [], 0.0
        for index in p.argsort(descending=True).tolist():
            if total >= 0.95:
                break
            kept.append(index)
            total += float(p[index])
        expected = torch.zeros(64, dtype=torch.float64)
        expected[kept] = p[kept] / total
        torch.testing.assert_close(result, expected, atol=1e-6, rtol=0)
