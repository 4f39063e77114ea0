"""Copies of a small plugin with one mistake each, as real modules, loaded and prepared as any plugin is."""

from __future__ import annotations

import importlib
import sys
from itertools import count
from pathlib import Path
from types import ModuleType

import pytest
import torch

from specdec.checkpoint.writer import write_checkpoint
from specdec.plugins import Discovery, Plugin, PluginRecord, inspect_plugin
from specdec.recipes import RecipeBook
from specdec.testing.conformance import Conformance

SOURCE = Path(__file__).parent / "recurrent_plugin"
_numbers = count()


class RecurrentConformance(Conformance):
    """Facts of the small plugin."""

    recipe = "recurrent-toy"
    budget = 24


def write_small_checkpoint(directory: Path) -> Path:
    """Weights whose greedy text is lively."""
    generator = torch.Generator().manual_seed(4)

    def normal(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * std

    tensors = {
        "embedding": normal(24, 12, std=1.0),
        "turn": normal(12, 12, std=0.6),
        "head": normal(24, 12, std=1.0),
        "draft": normal(12, 12, std=0.4),
    }
    return write_checkpoint(directory, tensors, {"model_type": "recurrent_toy"})


def written(folder: Path, *changes: tuple[str, str, str]) -> Path:
    """A copy of the plugin's package in ``folder``. changes: (file, text that is there once, what stands there instead)."""
    package = folder / f"authored_{next(_numbers)}"
    package.mkdir()
    sources = {path.name: path.read_text(encoding="utf-8") for path in SOURCE.glob("*.py")}
    for file, text, instead in changes:
        assert sources[file].count(text) == 1, f"{file} has {sources[file].count(text)} times: {text}"
        sources[file] = sources[file].replace(text, instead)
    for name, source in sources.items():
        (package / name).write_text(source, encoding="utf-8")
    return package


def line_of(file: Path, text: str) -> str:
    """ "file:line" of the one line that holds ``text``."""
    (number,) = (n for n, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1) if text in line)
    return f"{file}:{number}"


def imported(package: Path, patch: pytest.MonkeyPatch) -> ModuleType:
    """The plugin module of a written package."""
    patch.syspath_prepend(str(package.parent))
    module = importlib.import_module(f"{package.name}.plugin")
    for name in [name for name in sys.modules if name.split(".")[0] == package.name]:
        patch.setitem(sys.modules, name, sys.modules[name])
    return module


def inspected(package: Path, patch: pytest.MonkeyPatch) -> Plugin | PluginRecord:
    """What discovery makes of it."""
    return inspect_plugin(imported(package, patch), name="toy", distribution="specdec-toy", version="1.0")


def book_of(package: Path, patch: pytest.MonkeyPatch) -> RecipeBook:
    """The plugin alone, as the recipes that the conformance suite asks."""
    plugin = inspected(package, patch)
    assert isinstance(plugin, Plugin), plugin
    book = RecipeBook(discovery=Discovery(plugins=(plugin.record,), loaded=(plugin,)))
    for module in ("bench", "base"):
        patch.setattr(f"specdec.testing.conformance.{module}.recipe_book", lambda: book)
    return book
