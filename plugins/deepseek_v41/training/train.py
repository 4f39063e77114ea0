"""Trains the small checkpoint: one command, a wall-clock budget, results always written.

python plugins/deepseek_v41/training/train.py --corpus DIR --out DIR --seconds 570
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from training.architecture import Architecture  # noqa: E402
from training.command import main  # noqa: E402

from plugins.deepseek_v41.training import evaluation, export, parameters, quantisation  # noqa: E402
from plugins.deepseek_v41.training.model import Model  # noqa: E402
from plugins.deepseek_v41.training.trainer import BlockTrainer  # noqa: E402

ARCHITECTURE = Architecture(
    command="plugins/deepseek_v41/training/train.py",
    text_config=parameters.text_config,
    parameter_list=parameters.parameter_list,
    initialise=parameters.initialise,
    read_tokenizer=parameters.read_tokenizer,
    model=Model,
    straight_through=quantisation.straight_through,
    unquantised=quantisation.unquantised,
    checkpoint_values=quantisation.checkpoint_values,
    write_checkpoint=export.write_checkpoint,
    in_drafter=parameters.in_drafter,
    in_selector=lambda name, _: ".indexer." in name,
    top_k=None,
    top_p=1.0,
    layers=parameters.LAYERS,
    stored_form="FP8 and FP4 weights, quantised caches and inputs",
    balance_weight=0.001,
    balance_rate=0.002,
    budget=1024,
    options={
        "--window": ("window", 128, "rows of the sliding window"),
        "--table-base": ("table_base", 12_000, "lower bound of the primes of the Engram tables"),
    },
    trainer=BlockTrainer,
    report=evaluation.report,
)

if __name__ == "__main__":
    main(ARCHITECTURE, __doc__)
