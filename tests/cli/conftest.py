"""The command as users run it: a fresh process, and fake distributions that lie on disk as pip would leave them."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from attrs import define, field

ROOT = Path(__file__).parents[2]

#: A plugin module with one valid recipe; NAME is replaced.
HEALTHY = """
from specdec import hookimpl
from specdec.declaration import Recipe, SamplingDefaults, StateLayout, TensorInventory, WidthCatalog

RECIPE = Recipe(
    name="NAME", summary="a toy", checkpoint="example/NAME", model_types=("toy",), drafter_method="mtp",
    default_draft_tokens=3, max_draft_tokens=4, widths=WidthCatalog(widths=range(1, 6)),
    sampling=SamplingDefaults(temperature=1.0, top_k=20, top_p=0.95), eos_token_ids=(1,), supports_history_drafts=False,
    tensor_parallel_sizes=(1,), target_layout=StateLayout(owner="target", fields=(), max_draft_tokens=4),
    drafter_layout=StateLayout(owner="drafter", fields=(), max_draft_tokens=4),
    target_inventory=TensorInventory(groups=()), drafter_inventory=TensorInventory(groups=()),
    sources=[(name, "test") for name in
             ("default_draft_tokens", "max_draft_tokens", "sampling", "eos_token_ids", "speculative_token_capacity")],
)


@hookimpl
def declare_speculation():
    return [RECIPE]
"""


@define
class Result:
    """One finished command; its ``repr`` holds all that explains a failed assertion."""

    command: list[str]
    code: int
    stdout: str
    stderr: str

    def __repr__(self) -> str:
        return (
            f"$ {' '.join(self.command)}\nexit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"
        )


@define
class Site:
    """A folder on the path with modules and ``.dist-info`` folders."""

    path: Path
    variables: dict[str, str] = field(factory=dict)

    def distribution(
        self, name: str, *, version: str = "1.0", plugins: dict[str, str] | None = None, requires: Sequence[str] = ()
    ) -> None:
        """Installs metadata: ``plugins`` maps entry-point names to modules."""
        info = self.path / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {line}" for line in requires)]) + "\n")
        points = [f"{point} = {module}" for point, module in (plugins or {}).items()]
        (info / "entry_points.txt").write_text("\n".join(["[specdec]", *points]) + "\n")

    def module(self, name: str, text: str) -> None:
        (self.path / f"{name}.py").write_text(text)

    def healthy(self, module: str, recipe: str) -> None:
        self.module(module, HEALTHY.replace("NAME", recipe))

    @property
    def environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("SPECDEC_")}
        path = os.pathsep.join([str(self.path), str(ROOT / "core"), str(ROOT / "plugins" / "qwen38")])
        return {**kept, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "100", **self.variables}

    def python(self, *arguments: str) -> Result:
        command = [sys.executable, *arguments]
        # The folder is empty of packages, so that nothing is found by accident.
        done = subprocess.run(
            command, env=self.environment, cwd=self.path, capture_output=True, text=True, timeout=120, check=False
        )
        return Result(command=command[1:], code=done.returncode, stdout=done.stdout, stderr=done.stderr)

    def specdec(self, *arguments: str, **variables: str) -> Result:
        self.variables.update(variables)
        return self.python("-m", "specdec.cli.main", *arguments)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """A site with the real plugin's metadata, whether or not it is installed in this environment."""
    path = tmp_path / "site"
    path.mkdir()
    made = Site(path=path)
    made.distribution(
        "specdec-qwen38",
        version="0.1.0",
        plugins={"qwen38": "specdec_qwen38.plugin"},
        requires=["specdec-core>=0.1,<0.2"],
    )
    return made


@pytest.fixture
def one_line() -> Callable[[Result], str]:
    """Checks that a refused command said one line on stderr and nothing else, and returns the line."""

    def check(result: Result) -> str:
        assert result.stdout == "", result
        assert result.stderr.endswith("\n"), result
        assert result.stderr.count("\n") == 1, result
        assert result.stderr.startswith("specdec: error: "), result
        assert "Traceback" not in result.stderr, result
        return result.stderr.strip()

    return check
