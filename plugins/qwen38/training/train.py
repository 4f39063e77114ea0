"""Trains the small checkpoint: one command, a wall-clock budget, results always written.

python plugins/qwen38/training/train.py --corpus DIR --out DIR --seconds 570
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from training.architecture import Architecture  # noqa: E402
from training.command import main  # noqa: E402

from plugins.qwen38.training import export, parameters, quantisation  # noqa: E402
from plugins.qwen38.training.model import Model  # noqa: E402

ARCHITECTURE = Architecture(
    command="plugins/qwen38/training/train.py",
    text_config=parameters.text_config,
    parameter_list=parameters.parameter_list,
    initialise=parameters.initialise,
    model=Model,
    straight_through=quantisation.straight_through,
    unquantised=quantisation.unquantised,
    checkpoint_values=quantisation.checkpoint_values,
    write_checkpoint=export.write_checkpoint,
    in_drafter=lambda name, _: name.startswith(parameters.MTP),
    in_selector=lambda name, _: ".indexer." in name,
    top_k=20,
    top_p=0.95,
    layers=16,
    stored_form="NVFP4 experts and activations, FP8 table",
    options={"--table-base": ("table_base", 20_000, "ngram_vocab_size_base")},
)

if __name__ == "__main__":
    main(ARCHITECTURE, __doc__)
