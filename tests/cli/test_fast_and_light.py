"""Lists and help never load torch and answer at once."""

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec.cli.main import COMMANDS

HEAVY = ("torch", "numpy", "safetensors", "tokenizers", "transformers", "cattrs")

PROBE = """
import sys
{body}
loaded = sorted(name for name in {heavy!r} if name in sys.modules)
assert not loaded, loaded
"""


def check(site: Any, body: str, heavy: Sequence[str] = HEAVY) -> Any:
    result = site.python("-c", PROBE.format(body=body, heavy=heavy))
    assert result.code == 0, result
    return result


@pytest.mark.parametrize(
    "module",
    [
        "specdec",
        "specdec.errors",
        "specdec.declaration",
        "specdec.hookspecs",
        "specdec.plugins",
        "specdec.recipes",
        "specdec.catalog",
        "specdec.manifest",
        "specdec.interfaces",
        "specdec.control.calibration",
        "specdec.control.acceptance",
        "specdec.control.controller",
        "specdec.control.trace",
        "specdec.cli.main",
        "specdec_qwen38",
        "specdec_qwen38.plugin",
        "specdec_qwen38.recipe",
    ],
)
def test_import_is_light(site: Any, module: str) -> None:
    check(site, f"import {module}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["recipes", "--help"],
        ["recipes"],
        ["recipes", "qwen3.8-flash", "--json"],
        ["plugins"],
    ],
)
def test_lists_are_light(site: Any, arguments: list[str]) -> None:
    result = check(site, f"from specdec.cli.main import main\nassert main({arguments!r}) == 0")
    assert result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_is_light(site: Any, command: str) -> None:
    assert (
        "usage: specdec"
        in check(site, f"from specdec.cli.main import main\nassert main([{command!r}, '--help']) == 0").stdout
    )


def test_recipes_help_in_under_a_third_of_a_second(site: Any) -> None:
    command = [sys.executable, "-m", "specdec.cli.main", "recipes", "--help"]
    environment = site.environment

    def measured() -> tuple[float, float]:
        """Wall and processor seconds of one whole process."""
        before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, env=environment, cwd=site.path, check=True, capture_output=True)
        wall, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
        return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    measured()  # writes byte code and warms the disk cache
    walls: list[float] = []
    processors: list[float] = []
    # Other tests run beside this one, so the best of several medians counts; most often the first is enough.
    for _ in range(6):
        runs = [measured() for _ in range(5)]
        walls.append(statistics.median(wall for wall, _ in runs))
        processors.append(statistics.median(processor for _, processor in runs))
        if walls[-1] < 0.3:
            return
    # On a machine with more to do than it has processors, waiting says nothing about the command; its own work does.
    assert os.getloadavg()[0] > (os.cpu_count() or 1), walls
    assert min(processors) < 0.3, (walls, processors)


#: Imports every module of the packages and more, then serves simulated requests with copies, metrics and a trace.
SCHEDULING = """
import importlib, pkgutil, specdec.scheduling, specdec.control, specdec.simulation
names = [module.name for package in (specdec.scheduling, specdec.control, specdec.simulation)
         for module in pkgutil.iter_modules(package.__path__, package.__name__ + ".")]
assert len(names) > 18, names
names += ["specdec.drafting.history"]
names += ["specdec.serving." + name for name in ("metrics", "prometheus", "statistics", "request", "stops", "grammar")]
for name in names:
    importlib.import_module(name)
    assert "torch" not in sys.modules, name
sys.path.insert(0, {support!r})
from scheduler_bench import SchedulerBench
bench = SchedulerBench(queue_depth=2, copying=True)
bench.scheduler.trace = specdec.control.trace.TraceWriter("trace.jsonl")
for _ in range(8):
    bench.submit(output=40)
bench.finish()
assert len(list(specdec.control.trace.read_trace("trace.jsonl"))) > 10
assert "torch" not in sys.modules
"""


def test_scheduler_controller_and_simulator_work_without_torch(site: Any) -> None:
    """Not only when they are imported: nothing they do needs it."""
    support = str(Path(__file__).parents[1] / "support")
    # cattrs reads the profiles
    check(site, SCHEDULING.format(support=support), [name for name in HEAVY if name != "cattrs"])
