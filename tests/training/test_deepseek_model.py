"""DeepSeek's training form against the golden values of the tiny model, and its objective against sums written out.

The golden values were computed in float64 by a program of its own that shares no code with this repository, from weights that
are a function of the tensors' names. "On" and "off" say whether caches round their rows as the release's do.
"""

import pytest
import torch
from deepseek_models import GOLDEN_PROMPT, TINY, golden_tensors

ON, OFF = True, False
DIGITS = 1e-9
ANCHOR = 324

FREQUENCIES = {
    False: (1, 0.316227766, 0.1, 0.0316227766, 0.01, 0.0031622777, 0.001, 0.0003162278),
    True: (1, 0.1397542486, 0.0125, 0.002795085, 0.000625, 0.0001397542, 0.00003125, 0.0000069877),
}
# Table rows of layers 1 and 4 by position of the prompt.
ENGRAM_ROWS = {
    0: ([23, 106, 203, 221, 306, 373], [85, 181, 250, 345, 460, 575]),
    2: ([8, 131, 170, 231, 351, 409], [6, 140, 273, 346, 500, 624]),
    40: ([24, 70, 146, 232, 321, 412], [76, 119, 213, 388, 427, 591]),
}
LOGITS = {
    ON: {
        0: (-1.7954605799, 0.3009722574, 0.8331100941, 0.6200479582, -0.5825832754, -0.9868514070),
        40: (1.2948992073, 0.2250800477, -0.1991844103, 0.4391727997, 0.2623592236, -1.3280379147),
    },
    OFF: {
        0: (-1.8148707991, 0.2352483540, 0.8061220833, 0.6703298997, -0.5347933220, -0.9386359591),
        40: (2.0794542363, 0.0895117075, -0.1952239006, 0.5152715353, 0.0705597126, -1.6975075827),
    },
}
ARGMAX = {ON: [455, 447, 208, 403, 324], OFF: [53, 12, 41, 307, 324]}
TOTAL = {ON: 16568.5358539884, OFF: 16538.2544592105}
FEATURES = {
    ON: (-3.7556387644, -2.4219813645, -2.7259902474, -0.8373680692),
    OFF: (-3.0028886690, -1.7598701037, -1.8437852107, -0.3406376889),
}
FEATURES_TOTAL = {ON: 38197.3087447511, OFF: 38345.5351064153}
# Block length → proposals and confidences after the prompt and the anchor.
DRAFTS = {
    ON: {
        1: ([271], [0.525510130]),
        5: ([271, 1, 221, 303, 138], [0.625056994, 0.264217020, 0.530694278, 0.330010244, 0.153232995]),
        7: (
            [271, 1, 221, 303, 335, 221, 303],
            [0.683362245, 0.254943877, 0.166076085, 0.070620400, 0.035046928, 0.023516704, 0.045420195],
        ),
    },
    OFF: {
        1: ([271], [0.626907613]),
        5: ([271, 1, 221, 303, 138], [0.711640829, 0.623483727, 0.558468265, 0.322266078, 0.149074267]),
        7: (
            [432, 81, 274, 274, 274, 274, 274],
            [0.743033931, 0.462712767, 0.278994048, 0.145305673, 0.093547791, 0.092235918, 0.128724672],
        ),
    },
}


def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
    """Tensors under checkpoint names → parameters in training form."""
    found, experts = {}, {}
    for name, value in tensors.items():
        if ".experts." not in name:
            found[name] = value.double()
            continue
        stem, rest = name.split(".experts.")
        number, projection, _ = rest.split(".")
        experts.setdefault(f"{stem}.experts.{projection}", {})[int(number)] = value
    found |= {name: torch.stack([parts[e] for e in range(len(parts))]) for name, parts in experts.items()}
    return {name: torch.nn.Parameter(value, requires_grad="gate.bias" not in name) for name, value in found.items()}


@pytest.fixture(scope="module")
def golden(training_path):
    return TINY.to_config(), stacked(golden_tensors())


@pytest.fixture(params=[ON, OFF], ids=["on", "off"])
def caches(request) -> bool:
    return request.param


@pytest.fixture
def model(golden, caches):
    from plugins.deepseek_v41.training.model import Model

    made = Model(*golden, torch.float64)
    made.quantised = frozenset({"caches"} if caches else ())
    return made


def prompt(*further: int) -> torch.Tensor:
    return torch.tensor([[*GOLDEN_PROMPT, *further]])


def close(found: torch.Tensor, wanted, tolerance: float = DIGITS) -> None:
    torch.testing.assert_close(found, torch.as_tensor(wanted, dtype=torch.float64), atol=tolerance, rtol=0)


def drawn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- golden values --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressed", [False, True])
def test_frequencies(training_path, compressed):
    from plugins.deepseek_v41.training.model import frequencies

    close(frequencies(TINY.to_config(), compressed), FREQUENCIES[compressed], 1e-10)


def test_table_rows(golden):
    from plugins.deepseek_v41.training import engram
    from plugins.deepseek_v41.training.parameters import COMPRESSED_IDS

    config, parameters = golden
    ids = parameters[COMPRESSED_IDS].detach().long()
    history = engram.histories(ids[prompt()], ids[config["engram_pad_token_id"]], 4)
    for ordinal in range(2):
        rows = engram.Lookup(config, ordinal, torch.device("cpu")).rows(history)
        for position, wanted in ENGRAM_ROWS.items():
            assert rows[0, position].tolist() == wanted[ordinal]


@torch.no_grad()
def test_target(model, caches):
    logits, features, _ = model.target(prompt(), select=True)
    for row, wanted in LOGITS[caches].items():
        close(logits[0, row, :6], wanted)
    assert logits[0, 36:].argmax(-1).tolist() == ARGMAX[caches]
    close(logits.abs().sum(), TOTAL[caches], 1e-7)
    close(features[0, 40, [0, 128, 256, 383]], FEATURES[caches])
    close(features.abs().sum(), FEATURES_TOTAL[caches], 1e-7)
    dense = model.target(prompt())[0]
    # Every query of the first rows sees no more than it may select.
    close(dense[:, :8], logits[:, :8])
    assert (dense - logits).abs().max() > 1e-2


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 5, 7])
def test_drafts(model, caches, length):
    features = model.target(prompt(), select=True)[1]
    # A second anchor in the same pass changes nothing: blocks do not see each other.
    h, base = model.draft(features, prompt(ANCHOR), torch.tensor([[41, 20]]), length)
    previous, proposals, confidences = ANCHOR, [], []
    for slot in range(length):
        bias, confidence = model.correct(h[0, 0, slot], torch.tensor(previous))
        previous = int((base[0, 0, slot] + bias).argmax())
        proposals.append(previous)
        confidences.append(confidence.sigmoid())
    assert proposals == DRAFTS[caches][length][0]
    close(torch.stack(confidences), DRAFTS[caches][length][1], 1e-8)


@torch.no_grad()
def test_a_block_reads_only_what_precedes_its_anchor(model):
    text = prompt(ANCHOR)
    features, anchors = model.target(text)[1], torch.tensor([[3, 17, 18, 40]])
    together, _ = model.draft(features, text, anchors, 4)
    for column, anchor in enumerate(anchors[0].tolist()):
        before = torch.zeros_like(features)
        start = max(0, anchor - TINY.sliding_window)
        before[:, start:anchor] = features[:, start:anchor]
        alone, _ = model.draft(before, text, anchors[:, column : column + 1], 4)
        close(alone[:, 0], together[:, column], 1e-12)
        if start < anchor:
            before[:, start] = 0
            assert (model.draft(before, text, anchors[:, column : column + 1], 4)[0] - alone).abs().max() > 1e-6


# --- gradients ------------------------------------------------------------------------------------------------------------


def test_every_parameter_is_trained(golden):
    """Next-token loss, block loss and index loss together reach all parameters; the drafter's leaves embedding and head."""
    from plugins.deepseek_v41.training import objectives
    from plugins.deepseek_v41.training.model import Model

    config, parameters = golden
    trained = {n: p for n, p in parameters.items() if p.requires_grad and n != "engram.compressed_ids"}
    model, text, anchors = Model(config, parameters, torch.float64), prompt(7), torch.tensor([[5, 22, 30]])
    logits, features, statistics = model.target(text[:, :-1], keep=True)

    def reached(loss):
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True, retain_graph=True)
        return {n for n, g in zip(trained, gradients, strict=True) if g is not None and g.abs().sum() > 0}

    h, base = model.draft(features.detach(), text, anchors, 3)
    at = [objectives.at_slots(text, anchors + shift, 3) for shift in (0, 1)]
    bias, confidence = model.correct(h, at[0])
    terms = objectives.slot_terms(objectives.at_slots(logits, anchors, 3), base, bias, confidence, at[1])
    language = reached(torch.nn.functional.cross_entropy(logits[0], text[0, 1:]))
    drafter = reached(objectives.block_loss(terms, 0.5))
    index = reached(sum(model.index_loss(layer, *kept) for layer, kept in statistics["attention"].items()))
    names = set(trained)
    assert drafter == {n for n in names if n.startswith("mtp.")}
    assert index == {n for n in names if ".indexer." in n}
    unused = names - language - drafter - index
    # Experts that no token chose get nothing.
    assert all(".experts." in n for n in unused), sorted(unused)


def test_router_bias_moves_towards_equal_loads(golden):
    from plugins.deepseek_v41.training.model import Model

    config = golden[0]
    parameters = {n: torch.nn.Parameter(v.detach().clone(), v.requires_grad) for n, v in golden[1].items()}
    model, name, lacks = Model(config, parameters, torch.float64), "layers.4.ffn.gate.bias", []
    with torch.no_grad():
        for _ in range(60):
            statistics = model.target(prompt())[2]
            lacks.append(statistics["load"][name][0])
            model.rebalance({"target": statistics}, 0.02)
    assert lacks[-1].abs().max() < 0.6 * lacks[0].abs().max()


# --- objective ------------------------------------------------------------------------------------------------------------


def test_slots_are_aligned(training_path):
    """Slot k of anchor a: the target's row a + k − 1, the text's token a + k."""
    from plugins.deepseek_v41.training import objectives

    logits, text = drawn(2, 12, 5), torch.arange(26).view(2, 13) % 5
    anchors = torch.tensor([[0, 4], [2, 9]])
    base, confidence = drawn(2, 2, 3, 5, seed=2), drawn(2, 2, 3, seed=3)
    target, following = objectives.at_slots(logits, anchors, 3), objectives.at_slots(text, anchors + 1, 3)
    terms = objectives.slot_terms(target, base, torch.zeros(5), confidence, following)
    for b in range(2):
        for column, anchor in enumerate(anchors[b].tolist()):
            for k in range(1, 4):
                p = logits[b, anchor + k - 1].softmax(-1)
                q = base[b, column, k - 1].softmax(-1)
                accepted = sum(min(x, y) for x, y in zip(p.tolist(), q.tolist(), strict=True))
                place = (b, column, k - 1)
                close(terms.acceptance[place], accepted, 1e-12)
                close(terms.text[place], float(-q[text[b, anchor + k]].log()), 1e-12)
                close(terms.divergence[place], float((p * (p / q).log()).sum()), 1e-12)
                c = confidence[place].sigmoid()
                close(terms.confidence[place], float(-accepted * c.log() - (1 - accepted) * (1 - c).log()), 1e-12)


def test_block_loss_is_the_weighted_mean(training_path):
    from plugins.deepseek_v41.training.objectives import SlotTerms, block_loss

    rows = {"text": (1.0, 2.0, 3.0), "divergence": (0.5, 0.25, 1.0), "acceptance": (0.8, 0.1, 0.5)}
    terms = SlotTerms(**{n: torch.tensor([[v]]) for n, v in rows.items()}, confidence=torch.tensor([[[0.3, 0.2, 0.1]]]))
    decay = [2.718281828459045 ** (-k / 4) for k in range(3)]
    plain = sum(w * (d + c) for w, d, c in zip(decay, (0.5, 0.25, 1.0), (0.3, 0.2, 0.1), strict=True)) / sum(decay)
    assert float(block_loss(terms, 0.0)) == pytest.approx(plain, rel=1e-6)
    reach = (1.0, 0.8, 0.1)  # the third is 0.08, below the floor
    close_terms = [0.1 * t + 1.8 * (1 - a) for t, a in zip(rows["text"], rows["acceptance"], strict=True)]
    sharp = sum(w * (x + c) for w, x, c in zip(reach, close_terms, (0.3, 0.2, 0.1), strict=True)) / sum(reach)
    assert float(block_loss(terms, 1.0)) == pytest.approx(sharp, rel=1e-6)


def test_anchors_lie_in_the_text(training_path):
    from plugins.deepseek_v41.training.objectives import random_anchors

    generator = torch.Generator().manual_seed(4)
    found = random_anchors(500, 16, 121, generator, "cpu")
    assert found.min() == 0 and found.max() == 121
    assert (found.diff(dim=1) >= 0).all() and set(found.flatten().tolist()) == set(range(122))


def test_temperatures_are_those_of_the_core(training_path):
    """Certain outcomes are the special case of acceptances 0 and 1; probabilities of acceptance have no chance in them."""
    from plugins.deepseek_v41.training.evaluation import calibration
    from specdec.control.calibration import Outcome, fit_temperatures, survival_errors

    scores = 2 * drawn(400, 4, seed=8) + 1
    events = torch.rand(400, 4, generator=torch.Generator().manual_seed(9)) < torch.sigmoid(scores / 2.5)
    found = calibration(events.double(), scores)
    lengths = events.double().cumprod(-1).sum(-1).long().tolist()
    outcomes = [Outcome(scores=tuple(s), accepted=n) for s, n in zip(scores.tolist(), lengths, strict=True)]
    wanted = fit_temperatures(outcomes, chance=lambda forecasts: 0.0)
    assert found["temperatures"] == pytest.approx(wanted, rel=1e-5)
    assert found["error"] == pytest.approx(survival_errors(outcomes, wanted), abs=1e-4)
    assert found["error_uncalibrated"] == pytest.approx(survival_errors(outcomes, [1.0] * 4), abs=1e-4)
    assert sum(found["error"]) < sum(found["error_uncalibrated"])
