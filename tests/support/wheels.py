"""Wheels built from a copy of the sources, and environments with nothing of ours but some of them."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: object, **options: object) -> str:
    """What the command prints; it must succeed. Variables of this process that could change its imports are left out."""
    done = subprocess.run(
        [str(part) for part in command],
        env=isolated(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )  # type: ignore[call-overload]
    assert done.returncode == 0, f"$ {' '.join(str(part) for part in command)}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def isolated() -> dict[str, str]:
    """The variables of this process but for those that could change a command's imports."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("SPECDEC_", "PYTHON", "PIP_"))}


def build_wheels(folder: Path, plugins: Iterable[str]) -> dict[str, Path]:
    """Wheel files by distribution, the core's and those of ``plugins``, built with the build backend of this environment.

    Sources are copied to ``folder`` first, so that building leaves nothing in the repository.
    """
    source, output = folder / "specdec", folder / "wheels"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".venv")
    plugins = [f"plugins/{name}" for name in plugins]
    for part in ("core", *plugins):
        shutil.copytree(ROOT / part, source / part, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", output]
    for part in (".", *plugins):
        run(*pip, source / part)
    return {path.name.split("-")[0].replace("_", "-"): path for path in output.glob("*.whl")}


def install_wheels(folder: Path, wheels: Iterable[Path]) -> Path:
    """A new environment with ``wheels``; third-party packages are linked from this environment, ours are not."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", *wheels)
    link_third_party(folder)
    return folder


def link_third_party(environment: Path) -> None:
    """Lets a new environment see the third-party packages of this one."""
    site = run(environment / "bin" / "python", "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])")
    foreign = environment / "third_party"
    foreign.mkdir()
    for path in Path(sysconfig.get_paths()["purelib"]).iterdir():
        # packages of ours may be installed here too, with plugins that must not be seen
        if "specdec" not in path.name.lower():
            (foreign / path.name).symlink_to(path)
    # Appended to the path after the new environment's own packages.
    (Path(site.strip()) / "third_party.pth").write_text(f"{foreign}\n")


def names(wheel: Path) -> set[str]:
    """Names of the files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())
