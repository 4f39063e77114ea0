"""The errors that specdec raises on purpose, and the exit codes of the command line.

Imports only the standard library: every other module, heavy or light, may import this one.
"""

from enum import IntEnum

__all__ = [
    "CapacityError",
    "CaptureError",
    "CheckpointError",
    "DeclarationError",
    "DesynchronisationError",
    "DeviceError",
    "ExitCode",
    "PluginError",
    "RecipeError",
    "SpecdecError",
    "UsageError",
]


class ExitCode(IntEnum):
    """Exit codes of the ``specdec`` command.

    ====  ===========  =========================================================================================
    code  name         meaning
    ====  ===========  =========================================================================================
    0     OK           the command did what was asked, as far as the reader of its output stayed to see
    1     FAILURE      a fault of specdec itself (``SPECDEC_TRACEBACK=1`` shows where), or output that cannot be written
    2     USAGE        an option, argument, recipe name or prompt was refused
    3     PLUGIN       the plugin that is needed could not be loaded, or failed while preparing
    4     CHECKPOINT   a checkpoint is missing, truncated, or does not match what the recipe declares
    5     CAPACITY     the request or the preparation does not fit into what was asked for or into memory
    6     DEVICE       the machine lacks a device or a library that was asked for, or one does not work as it must
    130   INTERRUPTED  stopped from the keyboard
    ====  ===========  =========================================================================================
    """

    OK = 0
    FAILURE = 1
    USAGE = 2
    PLUGIN = 3
    CHECKPOINT = 4
    CAPACITY = 5
    DEVICE = 6
    INTERRUPTED = 130


class SpecdecError(Exception):
    """Base of every error that is raised on purpose.

    The message is one line that says what was wrong, where, what is allowed and what to do. Line breaks in the message are
    replaced, because the command line prints it as it is.
    """

    exit_code: ExitCode = ExitCode.FAILURE

    def __init__(self, message: str) -> None:
        super().__init__(" / ".join(line.strip() for line in str(message).splitlines() if line.strip()))


class UsageError(SpecdecError):
    """An option, an argument or a prompt is outside its allowed range."""

    exit_code = ExitCode.USAGE


class RecipeError(UsageError):
    """No loaded plugin declares the recipe that was asked for; the message offers close matches."""


class PluginError(SpecdecError):
    """A plugin that is needed could not be loaded, or one of its hooks failed; the message names distribution and version."""

    exit_code = ExitCode.PLUGIN


class CheckpointError(SpecdecError):
    """A checkpoint cannot be read, or disagrees with the recipe; the message names file and tensor."""

    exit_code = ExitCode.CHECKPOINT


class CapacityError(SpecdecError):
    """Something does not fit; the message names needed and available amounts and the options that change them."""

    exit_code = ExitCode.CAPACITY


class DeviceError(SpecdecError):
    """A device or a library for it is missing, too old or does not work as it must; the message says what to install."""

    exit_code = ExitCode.DEVICE


class CaptureError(SpecdecError):
    """A program cannot be captured as a CUDA graph, or a captured one is asked for what was not captured."""

    exit_code = ExitCode.PLUGIN


class DeclarationError(SpecdecError, ValueError):
    """A declaration (recipe, layout, inventory, manifest) contradicts itself or its format.

    It is a ``ValueError`` too, because attrs validators raise it and structuring code collects ``ValueError``.
    """

    exit_code = ExitCode.PLUGIN


class DesynchronisationError(SpecdecError):
    """Ranks that must do the same differ, or do not answer; the message names round, request and what each rank has."""
