"""The project's storage formulas, loaded from their files so that training needs nothing but torch."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).resolve().parents[1] / "core" / "specdec" / "checkpoint"


def load(name: str) -> ModuleType:
    """Returns the module ``core/specdec/checkpoint/NAME.py`` without importing its package."""
    spec = importlib.util.spec_from_file_location(f"training_{name}", _FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the compiler looks modules up by name
    spec.loader.exec_module(module)
    return module


nvfp4 = load("nvfp4")
