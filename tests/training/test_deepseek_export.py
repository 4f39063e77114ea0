"""DeepSeek's exported checkpoint: names, types and sizes against the architecture's tensor list, values against the formats.

The plugin's target and drafter run on the export and must agree with the training form.
"""

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
# The tokenizer of the corpus, as another plugin's checkpoint has it.
TOKENIZER = ROOT / "plugins/glm53/specdec_glm53/tiny/tokenizer.json"
COUNTS = {"files": 1, "tokens": 2}
RESULTS = {
    "corpus": {"counts": {"train": COUNTS, "heldout": COUNTS}, "sources": []},
    "parameters": {"target": 1, "mtp": 1},
    "hardware": "none",
    "torch": torch.__version__,
    "command": "none",
    "steps": {},
    "tokens": {},
    "history": [],
    "calibration": {"temperatures": [1.0] * 6 + [2.0], "error": [0.1] * 7, "error_uncalibrated": [0.2] * 7},
}


def written(folder: Path, **sizes: int) -> tuple[Path, dict, dict, int]:
    from plugins.deepseek_v41.training import export
    from plugins.deepseek_v41.training.parameters import initialise, read_tokenizer, text_config

    config = text_config(**sizes)
    parameters = initialise(config, seed=2)
    read_tokenizer(config, parameters, TOKENIZER)
    generator = torch.Generator().manual_seed(5)
    for name, value in parameters.items():
        drawn = torch.randn(value.shape, generator=generator)
        if name.endswith(("hc_attn_base", "hc_ffn_base", "attn_sink", "gate.bias")):
            value.data += 0.3 * drawn
        elif name.endswith(("norm.weight", "q_weight", "k_weight")):
            value.data += 0.1 * drawn
        elif name == "head.weight":
            value.data = 0.2 * drawn
    size = export.write_checkpoint(folder / "tiny", config, parameters, {}, TOKENIZER, RESULTS)
    return folder / "tiny", config, parameters, size


@pytest.fixture(scope="module")
def exported(training_path, tmp_path_factory):
    return written(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def shallow(training_path, tmp_path_factory):
    """Few layers and small limits, so that selection, candidates and the window's end matter."""
    return written(tmp_path_factory.mktemp("shallow"), layers=6, budget=16, window=16, table_base=500)


def test_stays_below_twelve_mebibytes(exported):
    assert exported[3] < 12 * 2**20 - 200_000
    assert exported[3] == sum(path.stat().st_size for path in exported[0].iterdir())


def test_tensors_match_the_published_layout(exported):
    from safetensors import safe_open

    from specdec_deepseek_v41.geometry import Geometry
    from specdec_deepseek_v41.inventory import StoredForm, dspark_inventory, target_inventory

    geometry, form = (
        Geometry.from_config(json.loads((exported[0] / "config.json").read_text())),
        StoredForm(image_bias=False),
    )
    parts = (target_inventory(geometry, form), dspark_inventory(geometry, form))
    expected = {spec.name: (spec.shape, spec.dtype) for part in parts for spec in part.expand()}
    types = {
        "BF16": "bfloat16",
        "F32": "float32",
        "I8": "int8",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E8M0": "float8_e8m0fnu",
    }
    with safe_open(str(exported[0] / "model.safetensors"), "pt") as stored:
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
        found = {name: (tuple(s.get_shape()), types[s.get_dtype()]) for name, s in slices.items()}
    assert found == expected


def test_pattern_of_the_architecture(exported):
    text = json.loads((exported[0] / "config.json").read_text())["text_config"]
    assert text["compress_ratios"] == [0, 0, *[2] * 6, *[1] * 8, 0, 0, 0]
    assert text["kv_source_layer_ids"] == [2, 5, 8] and text["index_source_layer_ids"] == [2, 5, 8, 12]
    assert text["engram_layer_ids"] == [1, 5] and text["dspark_target_layer_ids"] == [13, 14, 15]
    # Attention is exact over the training context of 1024 tokens.
    assert text["index_topk"] == 1024 and text["candidate_topk_blocks"] * text["candidate_block_size"] > 1024
    generation = json.loads((exported[0] / "generation_config.json").read_text())
    assert generation == {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "eos_token_id": 500}


def test_no_text_has_the_noise_and_pad_tokens(exported):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(exported[0] / "tokenizer.json"))
    content = json.loads((exported[0] / "config.json").read_text())
    ids = [content["text_config"]["dspark_noise_token_id"], content["pad_token_id"]]
    # Symbols of the bytes 0xff and 0xfe, which UTF-8 never has; no longer token contains them.
    assert [tokenizer.id_to_token(i) for i in ids] == ["ÿ", "þ"]
    assert not [t for t, i in tokenizer.get_vocab().items() if i not in ids and ("ÿ" in t or "þ" in t)]


def test_compressed_ids_are_those_of_the_plugin(exported):
    from plugins.deepseek_v41.training.parameters import COMPRESSED_IDS
    from specdec.checkpoint.reader import Checkpoint
    from specdec_deepseek_v41.engram_vocabulary import load_compressed_ids
    from specdec_deepseek_v41.geometry import Geometry

    with Checkpoint.open(exported[0]) as checkpoint:
        wanted = load_compressed_ids(checkpoint, Geometry.from_config(checkpoint.config))
    assert exported[2][COMPRESSED_IDS].long().tolist() == wanted.tolist()


def test_calibration_is_read_by_the_core(exported):
    from specdec.control.calibration import read_temperatures

    assert read_temperatures(exported[0], 7) == (1.0,) * 6 + (2.0,)


# --- stored values --------------------------------------------------------------------------------------------------------


def powers(scale: torch.Tensor) -> torch.Tensor:
    return 2.0 ** (scale.view(torch.uint8).double() - 127)


def decoded(stored: dict, name: str) -> torch.Tensor:
    """A quantised matrix, value by value."""
    codes, scale = stored[name + ".weight"], powers(stored[name + ".scale"])
    if codes.dtype == torch.int8:
        grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
        grid = torch.cat([grid, -grid])
        packed = codes.view(torch.uint8).long()
        values = torch.stack([grid[packed & 15], grid[packed >> 4]], -1).flatten(-2)
    else:
        values = codes.double()
    rows = torch.arange(values.shape[0]) // (values.shape[0] // scale.shape[0])
    return values * scale[rows][:, torch.arange(values.shape[1]) // 32]


def test_training_sees_the_stored_values(shallow):
    from safetensors.torch import load_file

    from plugins.deepseek_v41.training.quantisation import checkpoint_values, is_quantised, straight_through

    folder, _, parameters, _ = shallow
    stored = load_file(str(folder / "model.safetensors"))
    values = checkpoint_values(parameters)
    trained = straight_through(parameters, "target") | straight_through(parameters, "mtp")
    assert trained.keys() == {n for n in parameters if is_quantised(n)}
    for name, value in values.items():
        if ".experts." in name:
            stem, projection = name.rsplit(".", 1)
            expected = torch.stack([decoded(stored, f"{stem}.{e}.{projection}") for e in range(value.shape[0])])
        elif is_quantised(name):
            expected = decoded(stored, name.removesuffix(".weight"))
        elif name in stored:
            expected = stored[name].double()
        else:
            assert name == "engram.compressed_ids"
            continue
        assert torch.equal(value.double(), expected), name
        assert name not in trained or torch.equal(trained[name].double(), expected), name
    # Coarser than BF16 and close to the weights.
    name = "layers.3.ffn.experts.w1"
    error = ((values[name] - parameters[name]).square().mean() / parameters[name].square().mean()).sqrt()
    assert 0.02 < error < 0.2


def test_gradients_pass_the_rounding(shallow):
    from plugins.deepseek_v41.training.quantisation import straight_through

    parameters = shallow[2]
    for name in ("mtp.1.attn.wo_a.weight", "mtp.2.ffn.experts.w2"):
        weight = torch.randn(parameters[name].shape, generator=torch.Generator().manual_seed(1))
        found = straight_through(parameters, "mtp")[name]
        (gradient,) = torch.autograd.grad((found * weight).sum(), parameters[name])
        assert torch.equal(gradient, weight)


# --- the plugin on the export ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def as_run(shallow):
    """The training form of the stored checkpoint, float64, with every rounding that the plugin has."""
    from plugins.deepseek_v41.training.model import Model
    from plugins.deepseek_v41.training.quantisation import checkpoint_values

    _, config, parameters, _ = shallow
    values = {name: torch.nn.Parameter(v.double(), False) for name, v in checkpoint_values(parameters).items()}
    model = Model(config, values, torch.float64)
    model.quantised = frozenset({"caches", "inputs"})
    return model


def text(count: int = 100) -> torch.Tensor:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(11))


@torch.inference_mode()
def test_target_of_the_plugin(shallow, as_run):
    from deepseek_target import Driver

    features, logits = Driver(shallow[0]).prefill(0, text(), chunks=(37, 1))
    expected, expected_features, _ = as_run.target(text().unsqueeze(0), select=True)
    assert expected.std() > 0.5
    torch.testing.assert_close(features, expected_features[0], atol=1e-8, rtol=0)
    torch.testing.assert_close(logits, expected[0], atol=1e-8, rtol=0)
    dense = as_run.target(text().unsqueeze(0))[0]
    assert (dense - expected).abs().max() > 1e-3


class Recorder:
    """A proposer that takes the best token and keeps the logits."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []
        self.tokens: list[int] = []

    def draw(self, depth: int, logits: torch.Tensor) -> torch.Tensor:
        self.logits.append(logits[0].clone())
        self.tokens.append(int(logits[0].argmax()))
        return logits.argmax(-1)


@torch.inference_mode()
@pytest.mark.parametrize("count", [5, 61])
def test_drafter_of_the_plugin(shallow, as_run, count):
    from deepseek_target import Driver

    from specdec.checkpoint.reader import Checkpoint
    from specdec.interfaces import Capacities
    from specdec.state.requests import PENDING
    from specdec_deepseek_v41.drafter import DsparkDrafter

    driver, recorder, length, pending = Driver(shallow[0]), Recorder(), 7, 123
    capacities = Capacities(slots=3, context=120, pages=6, max_draft_tokens=7, dtype="float64", prefill_rows=120)
    with Checkpoint.open(shallow[0]) as checkpoint:
        drafter = DsparkDrafter(checkpoint, driver.target, capacities)
    prompt = text(count)
    drafter.prefill(driver.prefill(0, prompt)[0], prompt, torch.tensor([0]), 0)
    driver.table.integers[0, PENDING] = pending
    forecasts = drafter.propose(driver.lanes(0), length, recorder)

    features = as_run.target(prompt.unsqueeze(0), select=True)[1]
    tokens = torch.cat([prompt, torch.tensor([pending])]).unsqueeze(0)
    h, base = as_run.draft(features, tokens, torch.tensor([[count]]), length)
    bias, confidence = as_run.correct(h, torch.tensor([[[pending, *recorder.tokens[:-1]]]]))
    torch.testing.assert_close(torch.stack(recorder.logits), (base + bias)[0, 0], atol=1e-8, rtol=0)
    torch.testing.assert_close(forecasts[0].double(), confidence[0, 0].sigmoid(), atol=1e-6, rtol=0)
