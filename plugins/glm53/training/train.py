"""Trains the small checkpoint: one command, a wall-clock budget, results always written.

python plugins/glm53/training/train.py --corpus DIR --out DIR --seconds 570
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from training.architecture import Architecture  # noqa: E402
from training.command import main  # noqa: E402

from plugins.glm53.training import export, parameters, quantisation  # noqa: E402
from plugins.glm53.training.model import Model  # noqa: E402

ARCHITECTURE = Architecture(
    command="plugins/glm53/training/train.py",
    text_config=parameters.text_config,
    parameter_list=parameters.parameter_list,
    initialise=parameters.initialise,
    model=Model,
    straight_through=quantisation.straight_through,
    unquantised=quantisation.unquantised,
    checkpoint_values=quantisation.checkpoint_values,
    write_checkpoint=export.write_checkpoint,
    in_drafter=quantisation.of_drafter,
    in_selector=lambda name, _: ".indexer." in name,
    top_k=None,
    top_p=0.95,
    layers=17,
    stored_form="NVFP4 experts and activations",
    balance_weight=0.001,
    balance_rate=0.002,
)

if __name__ == "__main__":
    main(ARCHITECTURE, __doc__)
