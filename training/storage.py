"""The project's storage formulas, from the core package beside this folder (installed or not)."""

import sys
from pathlib import Path

_CORE = str(Path(__file__).resolve().parents[1] / "core")
if _CORE not in sys.path:
    sys.path.append(_CORE)

from specdec import hash_tables as hash_tables  # noqa: E402
from specdec.checkpoint import csf as csf  # noqa: E402
from specdec.checkpoint import nvfp4 as nvfp4  # noqa: E402
from specdec.control import calibration as calibration  # noqa: E402
from specdec.ops import block_quantisation as block_quantisation  # noqa: E402
