"""Writes a checkpoint directory: tensors, configuration, sampling defaults, tokenizer and card."""

import argparse
import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from training.state import load_state


def write_directory(
    directory: Path, tensors: dict, configuration: dict, generation: dict, tokenizer: Path, card: str
) -> int:
    """Writes the directory anew and returns its size in bytes."""
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(parents=True)
    save_file(dict(sorted(tensors.items())), str(directory / "model.safetensors"), metadata={"format": "pt"})
    for name, content in (("config.json", configuration), ("generation_config.json", generation)):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    shutil.copyfile(tokenizer, directory / "tokenizer.json")
    (directory / "README.md").write_text(card, encoding="utf-8")
    for path in directory.iterdir():
        path.chmod(0o644)
    return sum(p.stat().st_size for p in directory.iterdir())


def export_command(description: str, text_config, initialise, write_checkpoint) -> None:
    """The export command of a plugin: the outputs of a training run → a checkpoint directory."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = json.loads((arguments.run / "results.json").read_text())
    config = text_config(**results["text_config_arguments"])
    parameters = initialise(config, 0)
    scales = load_state(arguments.run, parameters)
    size = write_checkpoint(arguments.out, config, parameters, scales, arguments.tokenizer, results)
    print(f"{arguments.out}: {size:,} bytes")
