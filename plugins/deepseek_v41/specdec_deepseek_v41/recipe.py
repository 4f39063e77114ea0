"""The recipe ``deepseek-v4.1-flash``: numbers of the real checkpoint, each with its source.

Imports no torch and expands no inventory: this module is loaded by every command that lists recipes.
"""

from specdec.declaration import Recipe, SamplingDefaults, WidthCatalog

from .geometry import REAL
from .inventory import dspark_inventory, target_inventory
from .state import drafter_layout, target_layout

#: Rows of the longest drafted block. A preparation for fewer drafts has a shorter block, its length being no learned size; rounds
#: that draw fewer drafts than were prepared run the whole block.
MAX_DRAFT_TOKENS = 7

RECIPE = Recipe(
    name="deepseek-v4.1-flash",
    summary="DeepSeek-V4.1-Flash with its embedded DSpark drafter",
    checkpoint="deepseek-ai/DeepSeek-V4.1-Flash-1017",
    # Outer and text model types.
    model_types=("deepseek_v41", "deepseek_v41_text"),
    drafter_method="dspark",
    default_draft_tokens=MAX_DRAFT_TOKENS,
    max_draft_tokens=MAX_DRAFT_TOKENS,
    # a round drafts a whole block, or nothing; how much of the block is verified is decided inside the round
    widths=WidthCatalog(widths=(1, MAX_DRAFT_TOKENS + 1)),
    speculative_token_capacity=128,
    confidence_width=MAX_DRAFT_TOKENS,
    sampling=SamplingDefaults(temperature=1.0, top_k=0, top_p=1.0),
    eos_token_ids=REAL.eos_token_id,
    supports_history_drafts=False,
    tensor_parallel_sizes=(1,),
    target_layout=target_layout(REAL, max_draft_tokens=MAX_DRAFT_TOKENS),
    drafter_layout=drafter_layout(REAL, max_draft_tokens=MAX_DRAFT_TOKENS),
    target_inventory=target_inventory(REAL),
    drafter_inventory=dspark_inventory(REAL),
    embedded_checkpoint="specdec_deepseek_v41:tiny",
    profiles="specdec_deepseek_v41:profiles.json",
    inventories="specdec_deepseek_v41.inventory:inventories",
    memory="specdec_deepseek_v41.memory:declare",
    sources=(
        (
            "default_draft_tokens",
            "serving default of the recipe: a block of seven; the checkpoint's dspark_block_size is 5",
        ),
        ("max_draft_tokens", "explicit draft limits of the recipe go through seven"),
        ("widths", "rounds of seven drafts and width eight, and zero-draft rounds of width one"),
        ("speculative_token_capacity", "serving default of the recipe: 128 target rows"),
        ("confidence_width", "the confidence head has a forecast for each draft"),
        ("sampling", "no generation defaults are published: temperature 1.0 and no filter"),
        ("eos_token_ids", "eos_token_id of the checkpoint's config.json: 1"),
        ("model_types", "config.json of the published release: model_type of the outer and of the text configuration"),
        ("supports_history_drafts", "history-copy proposals are not offered for this model"),
        ("tensor_parallel_sizes", "one device; the plugin shards nothing"),
        (
            "target_inventory",
            "computed from the published names: 93,418 text tensors, 501,382,611,408 bytes; with the drafter 95,819 tensors, "
            "509,315,486,040 bytes",
        ),
        ("drafter_inventory", "computed from the published names: 2,401 tensors, 7,932,874,632 bytes"),
    ),
)
