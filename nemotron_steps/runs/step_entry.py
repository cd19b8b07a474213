"""The seam to a step's own code: its function, its config model, and what it raises as an error of this package."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemotron_steps.artifacts.files import as_storage_error, free_bytes
from nemotron_steps.artifacts.models import Artifact
from nemotron_steps.errors import StepFailedError, StepsError, StorageError, UnsupportedError, of_run
from nemotron_steps.errors.plugins import load_object
from nemotron_steps.resolver.plan import PlannedStep
from nemotron_steps.runs.step_workdir import bound_values

ENGINE = "pip install 'nemotron-steps[engine]'"
"""What brings the packages that train and generate."""
ENGINE_PACKAGES = frozenset(
    {"reasoning_gym", "math_verify", "psutil"}
    | {"torch", "megatron", "transformers", "tokenizers", "safetensors", "numpy"}
)
_ALMOST_NOTHING = 1 << 20
"""With less than this many bytes free, a failure of a writing library is taken for a full disk."""


def imported(reference: str, planned: PlannedStep) -> Any:
    """The function that a manifest names as `module:name`. UnsupportedError if it cannot be imported."""
    try:
        return load_object(reference)
    except ImportError as error:
        raise UnsupportedError(
            f"step '{planned.step_id}' cannot be imported: {error}",
            where=getattr(error, "line", None) or planned.manifest.where("step", "entry"),
            found=reference,
            hints=(ENGINE, "steps doctor") if _of_engine(error) else ("steps doctor",),
        ) from error
    except AttributeError as error:
        raise UnsupportedError(
            f"step '{planned.step_id}' names a function that does not exist",
            where=planned.manifest.where("step", "entry"),
            expected="a function '{2}' in {0}".format(*reference.partition(":")),
            found=reference,
        ) from error


def _of_engine(error: BaseException) -> bool:
    """Whether an import failed because the engine's packages are not installed."""
    missing = error if isinstance(error, ModuleNotFoundError) else error.__cause__
    return isinstance(missing, ModuleNotFoundError) and (missing.name or "").partition(".")[0] in ENGINE_PACKAGES


def validated_config(planned: PlannedStep, inputs: Mapping[str, Artifact]) -> Any:
    """The step's config model with input paths filled in; plain values for a step without a schema."""
    values: dict[str, Any] = copy.deepcopy(dict(planned.config))
    for key, path in bound_values(planned, inputs).items():
        *parents, last = key.split(".")
        node = values
        for part in parents:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[last] = path
    reference = planned.manifest.step.config_schema
    if reference is None:
        return values
    from nemotron_steps.config.compose import ComposedConfig
    from nemotron_steps.config.validation import load_schema, validate

    return validate(ComposedConfig(planned.step_id, values), load_schema(reference))


def as_steps_error(error: Exception, planned: PlannedStep, work: Path, run_id: str) -> StepsError:
    """What a step raised, as an error of this package."""
    if isinstance(error, StepsError) and not isinstance(error, StorageError):
        return of_run(error, run_id)
    if _of_engine(error):
        return UnsupportedError(
            f"step '{planned.step_id}' needs a package of the engine: {error}",
            where=planned.manifest.where("step", "entry"),
            hints=(ENGINE,),
        )
    storage = as_storage_error(error, work)
    if storage is not None:
        return storage
    if (free := free_bytes(work)) < _ALMOST_NOTHING:
        hint = "free some space and run the same command again: committed artifacts and checkpoints are kept"
        what = f"the step failed while the disk is full: {error}"
        return StorageError(what, where=str(work), found=f"{free} bytes free", hints=(hint,))
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}" if place is not None else None
    return StepFailedError(
        f"step '{planned.step_id}' failed: {type(error).__name__}: {error}",
        where=where,
        hints=(f"steps logs {run_id}   # has the traceback",),
    )
