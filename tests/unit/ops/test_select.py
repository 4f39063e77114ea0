"""Selection of kernels: what keeps the reference, and that every name a reference asks with is known."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import specdec.ops
from specdec.errors import UsageError
from specdec.ops import select
from specdec.ops.select import CUDA_OPERATORS, active_operators, reference_operators, uses_cuda

NAME = "rms_norm"


def operand(**changes: object) -> SimpleNamespace:
    """What the selection looks at of a CUDA tensor, on a machine that has none."""
    values = {"is_cuda": True, "dtype": torch.bfloat16, "requires_grad": False, "device": torch.device("cuda", 0)}
    return SimpleNamespace(**{**values, **changes})


@pytest.fixture(autouse=True)
def able_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(select.VARIABLE, raising=False)
    monkeypatch.setattr(select, "_missing", lambda index: None)
    monkeypatch.setattr(select, "_current_device", lambda: 0)


def test_kernels_run_on_cuda_operands_of_their_dtypes() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert uses_cuda(NAME, operand(dtype=dtype), operand())


@pytest.mark.parametrize(
    "changes", [{"is_cuda": False}, {"dtype": torch.float64}, {"dtype": torch.int64}, {"requires_grad": True}], ids=str
)
def test_one_unfit_operand_keeps_the_reference(changes: dict[str, object]) -> None:
    assert not uses_cuda(NAME, operand(), operand(**changes))


def test_a_gradient_that_nobody_records_does_not_matter() -> None:
    with torch.no_grad():
        assert uses_cuda(NAME, operand(requires_grad=True))


def test_a_device_without_support_keeps_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_missing", lambda index: "triton is not installed")
    assert not uses_cuda(NAME, operand())
    assert active_operators(torch.device("cuda", 0))[NAME] == "reference (triton is not installed)"


def test_operands_of_another_device_keep_the_reference() -> None:
    assert not uses_cuda(NAME, operand(device=torch.device("cuda", 1)))
    reason = "reference (device 1 is not the current one, 0)"
    assert active_operators(torch.device("cuda", 1))[NAME] == reason
    assert active_operators(torch.device("cuda"))[NAME] == "triton"


def test_operators_are_switched_off_for_a_block_and_nested() -> None:
    with reference_operators("collapse"):
        assert uses_cuda(NAME, operand())
        with reference_operators():
            assert not uses_cuda(NAME, operand())
        assert uses_cuda(NAME, operand())
        assert not uses_cuda("collapse", operand())
        assert active_operators(torch.device("cuda", 0))["collapse"] == "reference (switched off)"
    assert set(active_operators(torch.device("cuda", 0)).values()) == {"triton"}


def test_operators_are_switched_off_for_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(select.VARIABLE, "reference")
    assert not uses_cuda(NAME, operand())
    monkeypatch.setenv(select.VARIABLE, "fast")
    with pytest.raises(UsageError, match="SPECDEC_OPERATORS='fast'; allowed: auto, reference"):
        uses_cuda(NAME, operand())


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'rms_nrom' has no kernel"):
        uses_cuda("rms_nrom", operand())
    with pytest.raises(ValueError, match="no operators rms_nrom"), reference_operators("rms_nrom"):
        pass


def test_the_names_are_those_that_references_ask_with() -> None:
    folder = Path(specdec.ops.__file__).parent
    roots = [folder.parent, *(folder.parents[2] / "plugins").glob("*/specdec_*")]
    sources = [path.read_text(encoding="utf-8") for root in roots for path in root.rglob("*.py")]
    asked = {name for source in sources for name in re.findall(r'\buses_cuda\(\s*"(\w+)"', source)}
    assert asked == set(CUDA_OPERATORS)


def test_a_cpu_device_has_references_only_and_imports_no_triton() -> None:
    code = (
        "import sys, torch; from specdec.ops import select, norms; "
        "x = torch.ones(2, 8); norms.rms_norm(x, x[0], 1e-6); "
        "assert set(select.active_operators(torch.device('cpu')).values()) == {'reference (cpu device)'}; "
        "assert 'triton' not in sys.modules"
    )
    folder = Path(specdec.ops.__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=folder)
