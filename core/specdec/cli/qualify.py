"""``specdec qualify``: compares what this machine's GPU samples with the CPU reference and with known results.

Torch is imported inside ``run`` only. The table goes to stdout, what differed to stderr.
"""

from __future__ import annotations

import argparse
from typing import Any

from specdec.cli.output import say, write
from specdec.cli.tables import columns, json_text
from specdec.errors import DeviceError, ExitCode

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Runs FlashInfer's sampling kernels on a GPU and compares words of the random stream, words drawn by a verification, the order
of additions, the independence of lanes, and tokens on identical probabilities with known results and with the CPU reference.
Run it on every new kind of GPU and every new FlashInfer. The first run on a machine compiles the kernels, which takes minutes.
Exit code 0 if all agree, 6 if something differs or a GPU or FlashInfer is missing."""


def add_parser(subparsers: Any) -> None:
    """Adds ``qualify`` to the command line."""
    parser = subparsers.add_parser(
        "qualify",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--device", default="cuda", metavar="NAME", help="cuda or cuda:N (default: cuda)")
    parser.add_argument("--json", action="store_true", help="print data instead of a table")


def run(args: argparse.Namespace) -> int:
    """Prints one row for each check; returns the exit code.

    Raises DeviceError without a usable CUDA device, and if FlashInfer is missing, too old or does not run there.
    """
    from importlib import metadata

    import torch

    from specdec.sampling.qualification import qualify

    device = _device(args.device)
    # after the device: without a GPU it is not FlashInfer that is missing
    from specdec.sampling.flashinfer import FlashInferSampler

    sampler = FlashInferSampler(device)
    checks = []
    for check in qualify(sampler, device):
        checks.append(check)
        for line in check.failures[:5]:
            say(f"specdec: {check.name}: {line}")
    passed = all(check.ok for check in checks)
    about = {
        "device": torch.cuda.get_device_name(device),
        "flashinfer": metadata.version("flashinfer-python"),
        "torch": torch.__version__,
    }
    if args.json:
        found = [{"name": one.name, "cases": one.cases, "failures": list(one.failures)} for one in checks]
        write(json_text({**about, "ok": passed, "checks": found}))
    else:
        rows = [(one.name, one.cases, len(one.failures), "ok" if one.ok else "differs") for one in checks]
        write(columns([("check", "cases", "failures", "result"), *rows]))
        say(f"specdec: FlashInfer {about['flashinfer']} on {about['device']}, torch {about['torch']}")
    return int(ExitCode.OK if passed else ExitCode.DEVICE)


def _device(name: str) -> Any:
    """The torch device. Raises DeviceError if it is no CUDA device that works."""
    import torch

    try:
        device = torch.device(name)
        if device.type != "cuda":
            raise DeviceError(f"--device {name!r} is no GPU; FlashInfer samples on CUDA devices: cuda or cuda:N")
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise DeviceError(f"no CUDA device to qualify: {reason}; run this where torch sees a GPU") from error
    return device
