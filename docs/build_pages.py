"""Hooks of mkdocs: a line ``<!-- generated: NAME -->`` of a page becomes what ``CONTENT`` makes for that name.

So nothing that is generated is kept in the repository, and nothing that is shown can be older than the code or the raw results.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

DOCS = Path(__file__).parent
if str(DOCS) not in sys.path:
    sys.path.insert(0, str(DOCS))

from doc_pages import commands, figures, messages, metrics, numbers, records, reference  # noqa: E402

_PLACE = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
#: Classes that a plugin declares, in the order in which a reader meets them.
_DECLARED = ("Recipe", "DrafterRecipe", "WidthCatalog", "SamplingDefaults")
#: Where ``Engine.load`` passes its arguments on to.
_PASSED_ON = (("serving/engine", "Engine", "__init__"), ("serving/model", "LoadedModel", "prepare"))

CONTENT: Mapping[str, Callable[[], str]] = {
    # hooks.md
    "hooks-introduction": lambda: reference.module_introduction("hookspecs"),
    "hooks": lambda: reference.module_reference("hookspecs"),
    "interfaces": lambda: reference.module_reference("interfaces"),
    "declarations": lambda: reference.module_reference("declaration", _DECLARED, fields=False),
    "layout-records": lambda: reference.module_reference("layout", ("StateField", "StateLayout"), fields=False),
    "sourced-fields": records.sourced_fields,
    "tensor-records": lambda: reference.module_reference("tensors", ("TensorGroup", "TensorInventory")),
    "lanes": lambda: reference.module_reference("state/requests", ("Lanes",)),
    "store": lambda: reference.module_reference("state/store", ("StateStore",)),
    "shape": lambda: reference.module_reference("catalog", ("RoundShape",)),
    "packed-rows": lambda: reference.module_reference("round/allocation", ("PackedRows",)),
    "checkpoint": lambda: reference.module_reference("checkpoint/reader", ("Checkpoint",)),
    # adding-a-model.md
    "conformance-facts": lambda: reference.class_docstring("testing/conformance/base", "Conformance"),
    # recipes.md
    "recipe-list": records.recipe_list,
    "recipes": records.recipe_pages,
    # state-layouts.md
    "state-kinds": lambda: reference.class_docstring("layout", "StateKind"),
    "kinds-in-use": records.kinds_in_use,
    "layouts": records.layouts,
    # operations.md
    "commands": commands.command_list,
    "options": commands.option_tables,
    "exit-codes": lambda: reference.class_docstring("errors", "ExitCode"),
    "preparation": lambda: reference.class_docstring("preparation", "PreparationConfig"),
    "engine": lambda: reference.class_docstring("serving/engine", "Engine", "__init__"),
    "engine-load": lambda: reference.argument_table(
        "serving/engine", "Engine", "load", *_PASSED_ON, checkpoint="directory"
    ),
    "engine-methods": lambda: reference.methods("serving/engine", "Engine", "load", "submit", "generate", "close"),
    "request": lambda: reference.class_docstring("serving/request", "Request"),
    "request-fields": lambda: reference.field_table("serving/request", "Request"),
    "sampling-parameters": lambda: reference.class_docstring("sampling/params", "SamplingParams"),
    "sampling-fields": lambda: reference.field_table("sampling/params", "SamplingParams"),
    "stream": lambda: reference.module_reference("serving/engine", ("Stream", "Output")),
    "events": lambda: reference.module_reference("serving/request", ("Progress", "Emission", "TokenLogprobs")),
    "memory-kinds": records.memory_kinds,
    "metrics": metrics.metric_table,
    "snapshot": lambda: reference.class_docstring("serving/metrics", "Metrics", "snapshot"),
    "trace": lambda: reference.module_introduction("control/trace"),
    "messages": messages.message_tables,
    "numbers": numbers.number_tables,
    # performance.md
    "summary": figures.summary_table,
    "cpu": figures.cpu_tables,
    "gpu": figures.gpu_table,
    "captured": figures.captured_table,
    "overhead": figures.overhead_table,
    "phases": figures.phase_table,
    "conformance": figures.conformance_table,
    "plans": figures.plan_table,
    "host": figures.host_table,
    "edits": figures.edit_table,
    "history": figures.history_table,
    "forecasts": figures.forecast_table,
}


def on_files(files: Any, config: Any, **_: Any) -> Any:
    """Adds the plots of measured rounds, which lie beside their raw results."""
    for path in sorted((DOCS.parent / figures.RESULTS).glob("*_rounds_*.svg")):
        files.append(File.generated(config, f"figures/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fills in what is generated."""
    return filled(markdown, page.file.src_uri)


def filled(markdown: str, where: str) -> str:
    """A page's text with every place filled. Raises PluginError for a name that nothing is made for."""

    def made(found: re.Match[str]) -> str:
        if found[1] not in CONTENT:
            raise PluginError(f"{where}: nothing is generated under the name {found[1]!r}; known: {', '.join(CONTENT)}")
        return CONTENT[found[1]]()

    return _PLACE.sub(made, markdown)
