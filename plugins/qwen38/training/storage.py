"""The project's NVFP4 formulas, loaded from their file so that training needs nothing but torch."""

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).resolve().parents[3] / "core" / "specdec" / "checkpoint" / "nvfp4.py"
_SPEC = importlib.util.spec_from_file_location("training_nvfp4", _PATH)
nvfp4 = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = nvfp4  # the compiler looks modules up by name
_SPEC.loader.exec_module(nvfp4)
