"""What ``specdec doctor`` finds out, as plain data. Torch is imported inside functions only; nothing broken is an exception."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import frozen

import specdec
from specdec.declaration import Recipe
from specdec.errors import ExitCode, SpecdecError

if TYPE_CHECKING:
    from specdec.checkpoint.reader import Checkpoint
    from specdec.plugins import Discovery

__all__ = ["EXTRAS", "Extra", "Package", "findings"]

#: Context that memory is planned for, as far as the checkpoint has it: the default of ``specdec plan``.
_CONTEXT = 4096


@frozen(kw_only=True)
class Package:
    """A distribution, the module that must be importable, and the oldest release that serves (None: any)."""

    name: str
    module: str
    floor: str | None = None


@frozen(kw_only=True)
class Extra:
    """An extra of the core, what it is for, and its packages."""

    name: str
    what: str
    packages: tuple[Package, ...]


#: As ``pyproject.toml`` has them; Triton comes with torch.
EXTRAS = (
    Extra(
        name="cuda",
        what="sampling by FlashInfer's kernels on a GPU",
        packages=(
            Package(name="flashinfer-python", module="flashinfer.sampling", floor="0.7.4"),
            Package(name="triton", module="triton"),
        ),
    ),
    Extra(
        name="grammar",
        what="output that satisfies a grammar",
        packages=(Package(name="llguidance", module="llguidance", floor="1.9"),),
    ),
    Extra(
        name="metrics",
        what="figures as Prometheus text",
        packages=(Package(name="prometheus-client", module="prometheus_client", floor="0.21"),),
    ),
    Extra(
        name="chat",
        what="chat templates of checkpoints",
        packages=(Package(name="jinja2", module="jinja2", floor="3.1.6"),),
    ),
    Extra(
        name="completion",
        what="completion in a shell",
        packages=(Package(name="argcomplete", module="argcomplete", floor="3.3"),),
    ),
    Extra(
        name="testing",
        what="the conformance suite of plugins",
        packages=(Package(name="pytest", module="pytest", floor="8"),),
    ),
)


def findings() -> dict[str, Any]:
    """Everything. ``problems``: lines for a person, one for each reason that ``exit_code`` is not 0."""
    torch, devices = _torch(), _devices()
    discovery, failure = _tried(_discovery)
    problems: list[tuple[ExitCode, str]] = []
    if discovery is None:
        problems.append((ExitCode.PLUGIN, f"plugins cannot be looked for: {failure}"))
    else:
        problems += [(ExitCode.PLUGIN, notice) for notice in discovery.notices]
        problems += [
            (ExitCode.PLUGIN, f"plugin {record.label} is not usable ({record.status}): {record.reason}")
            for record in discovery.troubled
        ]
    if not torch["works"]:
        problems.append((ExitCode.DEVICE, f"torch cannot be imported: {torch['reason']}"))
    recipes = () if discovery is None else discovery.recipes
    return {
        "core": {"version": specdec.__version__, "path": str(Path(str(specdec.__file__)).parent)},
        "python": {
            "version": platform.python_version(),
            "executable": sys.executable,
            "platform": f"{platform.system()} {platform.machine()}",
        },
        "torch": torch,
        "devices": devices,
        "extras": [_extra(extra) for extra in EXTRAS],
        "plugins": [] if discovery is None else [_plugin(record) for record in discovery.plugins],
        "recipes": [_recipe(recipe, torch["works"], devices) for recipe in recipes],
        "problems": [line for _, line in problems],
        "exit_code": int(problems[0][0] if problems else ExitCode.OK),
    }


def _tried(action: Callable[[], Any]) -> tuple[Any, str]:
    """What an action returns, or None and one line with what it raised. What it prints is thrown away."""
    nowhere = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(nowhere),
            contextlib.redirect_stderr(nowhere),
            warnings.catch_warnings(action="ignore"),
        ):
            return action(), ""
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a library's panic is no Exception
        message = " / ".join(line.strip() for line in str(error).splitlines() if line.strip())
        kind = type(error).__name__
        return None, message if isinstance(error, SpecdecError) else f"{kind}: {message}" if message else kind


def _discovery() -> Discovery:
    from specdec.recipes import recipe_book

    return recipe_book().discovery


def _plugin(record: Any) -> dict[str, Any]:
    fields = ("name", "distribution", "version", "status", "reason")
    return {**{name: str(getattr(record, name)) for name in fields}, "recipes": list(record.recipes)}


# --- packages --------------------------------------------------------------------------------------------------------------


def _version(name: str) -> str | None:
    found, _ = _tried(lambda: str(metadata.version(name)))
    return found


def _torch() -> dict[str, Any]:
    """version: as installed; cuda: what it was built for. works: whether it can be imported, else the reason."""
    module, reason = _tried(lambda: import_module("torch"))
    version, _ = _tried(lambda: str(module.__version__))
    cuda, _ = _tried(lambda: module.version.cuda)
    return {
        "version": version or _version("torch"),
        "works": module is not None,
        "cuda": cuda,
        "reason": reason if module is None else "",
    }


def _extra(extra: Extra) -> dict[str, Any]:
    """state: works, missing, too old or broken, the worst of its packages'."""
    packages = [_package(package) for package in extra.packages]
    state = next(
        (word for word in ("missing", "too old", "broken") if any(p["state"] == word for p in packages)), "works"
    )
    return {
        "name": extra.name,
        "what": extra.what,
        "state": state,
        "packages": packages,
        "cure": "" if state == "works" else f"pip install 'specdec-core[{extra.name}]'",
    }


def _package(package: Package) -> dict[str, Any]:
    version = _version(package.name)
    state, reason = "works", ""
    old, unreadable = _tried(lambda: _older(version, package.floor))
    if version is None:
        state = "missing"
    elif old or unreadable:
        state, reason = "too old", unreadable or f"needs {package.floor} or later"
    else:
        module, failure = _tried(lambda: import_module(package.module))
        if module is None:
            state, reason = "broken", failure
    return {"name": package.name, "version": version, "floor": package.floor, "state": state, "reason": reason}


def _older(version: str | None, floor: str | None) -> bool:
    from packaging.version import Version

    return version is not None and floor is not None and Version(version) < Version(floor)


# --- devices ---------------------------------------------------------------------------------------------------------------


def _devices() -> list[dict[str, Any]]:
    """The CPU, and every CUDA device or why there is none. free_bytes: None where it is not known."""
    cpu = {"name": "cpu", "found": True, "kind": platform.processor() or platform.machine(), "reason": ""}
    found = [{**cpu, "free_bytes": _tried(_free_host_bytes)[0]}]
    cuda, reason = _tried(_cuda_devices)
    if not cuda:
        nothing = {"name": "cuda", "found": False, "kind": None, "free_bytes": None}
        found.append({**nothing, "reason": reason or "torch sees no CUDA device"})
    return found + (cuda or [])


def _free_host_bytes() -> int | None:
    """Memory that can be had without swapping."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cuda_devices() -> list[dict[str, Any]]:
    import torch

    found = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        memory, reason = _tried(partial(torch.cuda.mem_get_info, number))
        kind, _ = _tried(partial(torch.cuda.get_device_name, number))
        found.append(
            {
                "name": f"cuda:{number}",
                "found": memory is not None,
                "kind": kind,
                "free_bytes": None if memory is None else int(memory[0]),
                "reason": reason,
            }
        )
    return found


# --- recipes ---------------------------------------------------------------------------------------------------------------


def _recipe(recipe: Recipe, torch_works: bool, devices: list[dict[str, Any]]) -> dict[str, Any]:
    """embedded: the checkpoint that comes with the plugin, planned for the CPU; own: the one that it is declared for, planned for
    a GPU. Each: where it is, bytes that it needs, runs_on, and a reason where that is empty."""
    return {
        "name": recipe.name,
        "drafter_method": recipe.drafter_method,
        "embedded": _verdict(*_embedded(recipe), torch_works, [one for one in devices if one["name"] == "cpu"]),
        "own": _verdict(*_own(recipe), torch_works, [one for one in devices if one["name"] != "cpu"]),
    }


def _verdict(
    where: str,
    count: int | None,
    weights_alone: bool,
    reason: str,
    torch_works: bool,
    devices: list[dict[str, Any]],
) -> dict[str, Any]:
    """reason: what is wrong with the checkpoint itself, if anything is."""
    present = [one for one in devices if one["found"]]
    fitting = [one["name"] for one in present if None in (count, one["free_bytes"]) or count <= one["free_bytes"]]
    if not reason and not torch_works:
        reason = "torch does not work"
    elif not reason and not present:
        reason = "; ".join(f"no {one['name']} device: {one['reason']}" for one in devices)
    elif not reason and not fitting:
        from specdec.memory import sized

        reason = "; ".join(f"{one['name']} has {sized(one['free_bytes'])} free" for one in present)
    return {
        "where": where,
        "bytes": count,
        "weights_alone": weights_alone,
        "runs_on": [] if reason else fitting,
        "reason": reason,
    }


def _embedded(recipe: Recipe) -> tuple[str, int | None, bool, str]:
    """Place, bytes, whether these are the weights' alone, and why it cannot be used."""
    from specdec.checkpoint.accepted import check_model_type, embedded_checkpoint, open_checkpoint

    where = recipe.embedded_checkpoint or "none"
    if recipe.embedded_checkpoint is None:
        return where, None, False, "the plugin ships none; name a folder with --checkpoint"
    path, reason = _tried(lambda: str(embedded_checkpoint(recipe)))
    checkpoint, reason = (None, reason) if path is None else _tried(lambda: open_checkpoint(recipe))
    if checkpoint is None:
        return path or where, None, False, reason

    def usable() -> bool:
        check_model_type(checkpoint, recipe)
        checkpoint.tokenizer()
        return True

    _, reason = _tried(usable)
    count, alone, unplanned = _bytes(recipe, checkpoint)
    _tried(checkpoint.close)
    return str(path), count, alone, reason or unplanned


def _own(recipe: Recipe) -> tuple[str, int | None, bool, str]:
    """As ``_embedded``; the folder itself is the user's to have."""
    count, alone, reason = _bytes(recipe, None)
    return recipe.checkpoint, count, alone, reason


def _bytes(recipe: Recipe, checkpoint: Checkpoint | None) -> tuple[int | None, bool, str]:
    """Bytes that a preparation needs, or those of the weights alone (True) where no memory is declared; None where neither is
    known. Last, why what is declared cannot be planned."""
    if recipe.memory is not None:
        planned, reason = _tried(lambda: _planned(recipe, checkpoint))
        return planned, False, reason
    stored, _ = _tried(lambda: _stored(recipe, checkpoint))
    return stored or None, bool(stored), ""


def _planned(recipe: Recipe, checkpoint: Checkpoint | None) -> int:
    """As ``specdec plan`` counts it with its defaults: for a GPU, or on the CPU for an embedded checkpoint."""
    from specdec.checkpoint.accepted import context_limit
    from specdec.memory_plan import plan_memory
    from specdec.preparation import PreparationConfig

    limit = None if checkpoint is None else context_limit(checkpoint)
    config = PreparationConfig.for_recipe(recipe, context=min(_CONTEXT, limit or _CONTEXT))
    small = checkpoint is not None
    return plan_memory(
        recipe,
        config,
        settings=None if checkpoint is None else checkpoint.config,
        checkpoint=checkpoint,
        dtype="float32" if small else "bfloat16",
        device="cpu" if small else "cuda",
    ).total


def _stored(recipe: Recipe, checkpoint: Checkpoint | None) -> int:
    """Bytes of the tensors as they are stored or declared."""
    if checkpoint is None:
        return recipe.target_inventory.bytes + recipe.drafter_inventory.bytes
    return sum(checkpoint.stored(name).bytes for name in checkpoint.names)
