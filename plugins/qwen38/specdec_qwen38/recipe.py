"""The recipe ``qwen3.8-flash``: numbers of the real checkpoint, each with its source.

Imports no torch and expands no inventory: this module is loaded by every command that lists recipes.
"""

from specdec.declaration import Recipe, SamplingDefaults, WidthCatalog

from .geometry import REAL
from .inventory import mtp_inventory, target_inventory
from .state import drafter_layout, target_layout

#: The recurrent verification of the target takes at most eight inputs per request: the pending token and seven drafts.
MAX_DRAFT_TOKENS = 7

RECIPE = Recipe(
    name="qwen3.8-flash",
    summary="Qwen3.8-Flash-Next with its embedded MTP layer",
    checkpoint="nvidia/Qwen3.8-Flash-Next-FP4-Local",
    # Outer and text model types; older exports of the same weights say qwen3_8_flash_next.
    model_types=("qwen4_exp", "qwen4_exp_text", "qwen3_8_flash_next"),
    drafter_method="mtp",
    default_draft_tokens=5,
    max_draft_tokens=MAX_DRAFT_TOKENS,
    widths=WidthCatalog(widths=tuple(range(1, MAX_DRAFT_TOKENS + 2))),
    speculative_token_capacity=128,
    sampling=SamplingDefaults(temperature=1.0, top_k=20, top_p=0.95),
    eos_token_ids=(248046, 248044),
    supports_history_drafts=True,
    tensor_parallel_sizes=(1,),
    target_layout=target_layout(REAL, max_draft_tokens=MAX_DRAFT_TOKENS),
    drafter_layout=drafter_layout(REAL, max_draft_tokens=MAX_DRAFT_TOKENS),
    target_inventory=target_inventory(REAL),
    drafter_inventory=mtp_inventory(REAL),
    embedded_checkpoint="specdec_qwen38:tiny",
    profiles="specdec_qwen38:profiles.json",
    inventories="specdec_qwen38.inventory:inventories",
    memory="specdec_qwen38.memory:declare",
    canonical_name="specdec.tensor_names:canonical_name",
    sources=(
        ("default_draft_tokens", "serving default of the recipe: widths one to six"),
        (
            "max_draft_tokens",
            "gated delta net verification takes at most eight inputs: the pending token and seven drafts",
        ),
        ("speculative_token_capacity", "serving default of the recipe: 128 target rows"),
        ("sampling", "generation defaults of the checkpoint: temperature 1.0, top-k 20, top-p 0.95"),
        (
            "eos_token_ids",
            "248044: eos_token_id of the checkpoint's text_config; 248046: stop id of Qwen3.8-27B, assumed shared",
        ),
        ("model_types", "config.json of the published exports: model_type of the outer and of the text configuration"),
        ("tensor_parallel_sizes", "one device; the plugin shards nothing"),
        (
            "target_inventory",
            "header audit of the published NVFP4 export: 296,111 text tensors, vision and MTP parts not counted",
        ),
        ("drafter_inventory", "the checkpoint's mtp.* tensors: 4,637 tensors, 1,596,720,640 bytes"),
    ),
)
