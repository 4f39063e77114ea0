"""The recipe ``glm-5.3-flash``: numbers of the real checkpoint, each with its source.

Imports no torch and expands no inventory: this module is loaded by every command that lists recipes.
"""

from specdec.declaration import Recipe, SamplingDefaults, WidthCatalog

from .geometry import REAL
from .inventory import mtp_inventory, target_inventory
from .state import drafter_layout, target_layout

#: The target keeps one recurrent checkpoint for each of at most eight inputs: the pending token and seven drafts.
MAX_DRAFT_TOKENS = 7

RECIPE = Recipe(
    name="glm-5.3-flash",
    summary="GLM-5.3-Flash with its embedded MTP layer",
    checkpoint="nvidia/GLM-5.3-Flash-FP4-Local",
    # Outer and text model types.
    model_types=("glm5_next", "glm5_next_text"),
    drafter_method="mtp",
    default_draft_tokens=5,
    max_draft_tokens=MAX_DRAFT_TOKENS,
    widths=WidthCatalog(widths=tuple(range(1, MAX_DRAFT_TOKENS + 2))),
    speculative_token_capacity=128,
    # top_k 0: the checkpoint asks for none
    sampling=SamplingDefaults(temperature=1.0, top_k=0, top_p=0.95),
    eos_token_ids=REAL.eos_token_id,
    supports_history_drafts=False,
    tensor_parallel_sizes=(1, 2, 4),
    target_layout=target_layout(REAL, max_draft_tokens=MAX_DRAFT_TOKENS),
    drafter_layout=drafter_layout(REAL, max_draft_tokens=MAX_DRAFT_TOKENS),
    target_inventory=target_inventory(REAL),
    drafter_inventory=mtp_inventory(REAL),
    embedded_checkpoint="specdec_glm53:tiny",
    profiles="specdec_glm53:profiles.json",
    inventories="specdec_glm53.inventory:inventories",
    memory="specdec_glm53.memory:declare",
    canonical_name="specdec.tensor_names:canonical_name",
    sources=(
        ("default_draft_tokens", "serving default of the recipe: widths one to six"),
        ("max_draft_tokens", "one recurrent checkpoint for each of eight inputs: the pending token and seven drafts"),
        ("speculative_token_capacity", "serving default of the recipe: 128 target rows"),
        ("sampling", "generation defaults of the checkpoint: temperature 1.0, top-p 0.95, no top-k"),
        ("eos_token_ids", "eos_token_id of the checkpoint's text_config: 154820, 154827, 154829"),
        ("model_types", "config.json of the published release: model_type of the outer and of the text configuration"),
        ("supports_history_drafts", "history-copy proposals are not offered for this model"),
        (
            "tensor_parallel_sizes",
            "sizes that divide heads, expert widths and the vocabulary; two and four are declared only",
        ),
        (
            "target_inventory",
            "computed from the published names: 1,246 dense text tensors, 17,842,600,184 bytes; expert storage of NVFP4 "
            "derivatives with coded scales, whose exception words come on top",
        ),
        ("drafter_inventory", "computed from the published names, NVFP4 experts: 2,617 tensors, 4,446,537,728 bytes"),
    ),
)
