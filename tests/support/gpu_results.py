"""Raw results of tests on a GPU: one JSON line each, in the file that SPECDEC_RESULTS names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch


def record(**row: object) -> None:
    """Appends a line, with what it was measured on; does nothing without the variable."""
    path = os.environ.get("SPECDEC_RESULTS")
    if not path:
        return
    row |= {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "source": os.environ.get("SPECDEC_COMMIT", "unknown"),
    }
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
