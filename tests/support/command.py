"""Commands run inside the test process: no second import of torch, and the test can watch what they do."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import frozen

from specdec.cli.main import main


@frozen(kw_only=True)
class Outcome:
    """One finished command; its ``repr`` holds all that explains a failed assertion."""

    arguments: tuple[str, ...]
    code: int
    stdout: str
    stderr: str

    def __repr__(self) -> str:
        command = " ".join(self.arguments)
        return f"$ specdec {command}\nexit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"

    @property
    def refusal(self) -> str:
        """The one line of a refused command, which must have said nothing else."""
        assert self.stdout == "", self
        assert self.stderr.startswith("specdec: error: "), self
        assert self.stderr.endswith("\n") and self.stderr.count("\n") == 1, self
        return self.stderr.strip()


def specdec(capsys: pytest.CaptureFixture[str], *arguments: object) -> Outcome:
    """Runs ``specdec`` with the arguments; what was printed before is thrown away."""
    words = tuple(str(argument) for argument in arguments)
    capsys.readouterr()
    code = main(words)
    out, err = capsys.readouterr()
    return Outcome(arguments=words, code=code, stdout=out, stderr=err)


RECIPE = "qwen3.8-flash"
PROMPT = "def main(arguments):\n    return "


@frozen(kw_only=True, eq=False)
class RunCommand:
    """``specdec run`` on a checkpoint with a short prompt and budget unless the options say otherwise."""

    capsys: pytest.CaptureFixture[str]
    checkpoint: Path

    def __call__(self, *options: object, recipe: str = RECIPE, folder: Path | None = None) -> Outcome:
        defaults: list[object] = ["--checkpoint", folder or self.checkpoint]
        if not {"--prompt", "--prompt-file"}.intersection(options):
            defaults += ["--prompt", PROMPT]
        if "--max-new-tokens" not in options:
            defaults += ["--max-new-tokens", "24"]
        return specdec(self.capsys, "run", recipe, *defaults, *options)
