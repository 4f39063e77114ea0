"""``specdec qualify``: what it says without a GPU or FlashInfer, and its table and data where a sampler can be compared."""

from __future__ import annotations

import json
from importlib import metadata

import fake_flashinfer
import pytest
import torch
from command import specdec

from specdec.cli import qualify as command
from specdec.sampling import qualification
from specdec.sampling.sampler import ReferenceSampler

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@CPU_ONLY
@pytest.mark.parametrize("options", [(), ("--json",), ("--device", "cuda:3")])
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], options: tuple[str, ...]) -> None:
    found = specdec(capsys, "qualify", *options)
    assert found.code == 6
    assert "no CUDA device to qualify" in found.refusal and "run this where torch sees a GPU" in found.refusal


@pytest.mark.parametrize("name", ["cpu", "tpu:0"])
def test_other_devices_are_refused(capsys: pytest.CaptureFixture[str], name: str) -> None:
    found = specdec(capsys, "qualify", "--device", name)
    assert found.code == 6 and "cuda" in found.refusal.lower()


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The CPU passes for a GPU, and fake kernels for FlashInfer's; small buffers only."""
    monkeypatch.setattr(command, "_device", torch.device)
    monkeypatch.setattr("specdec.sampling.flashinfer.FlashInferSampler", fake_flashinfer.OneStream)
    monkeypatch.setattr("specdec.sampling.flashinfer.flashinfer_sampling", fake_flashinfer.module)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a processor")
    monkeypatch.setattr(metadata, "version", lambda name: "0.7.4")
    whole = qualification.qualify
    monkeypatch.setattr(qualification, "qualify", lambda sampler, device: whole(sampler, device, (5, 100)))
    return monkeypatch


def test_without_flashinfer_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(command, "_device", torch.device)
    monkeypatch.setattr(metadata, "version", missing)
    found = specdec(capsys, "qualify", "--device", "cpu")
    assert found.code == 6
    assert "FlashInfer is not installed" in found.refusal and "pip install 'specdec-core[cuda]'" in found.refusal


def test_a_table_and_data(capsys: pytest.CaptureFixture[str], pretended_gpu: pytest.MonkeyPatch) -> None:
    found = specdec(capsys, "qualify", "--device", "cpu")
    assert found.code == 0, found
    lines = found.stdout.splitlines()
    assert lines[0].split() == ["check", "cases", "failures", "result"] and len(lines) == 8
    assert all(line.endswith("ok") for line in lines[1:])
    assert "FlashInfer 0.7.4 on a processor" in found.stderr
    data = json.loads(specdec(capsys, "qualify", "--device", "cpu", "--json").stdout)
    assert data["ok"] and data["device"] == "a processor" and len(data["checks"]) == 7


def test_differences_are_named_and_change_the_exit_code(
    capsys: pytest.CaptureFixture[str], pretended_gpu: pytest.MonkeyPatch
) -> None:
    class Shifted(ReferenceSampler):
        def draw(self, probs, words, domain, index):
            return super().draw(probs, words, domain, index + 1)

    pretended_gpu.setattr("specdec.sampling.flashinfer.FlashInferSampler", lambda device: Shifted())
    found = specdec(capsys, "qualify", "--device", "cpu")
    assert found.code == 6
    assert [line.split()[-1] for line in found.stdout.splitlines()[1:]].count("differs") >= 1
    assert "draws equal the CPU's: vocabulary 5, word 0:" in found.stderr and "expected" in found.stderr
