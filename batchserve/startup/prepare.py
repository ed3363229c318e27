"""Makes a model ready to run steps: from its kept program, or by loading it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from batchserve.free_memory import check_weights_fit
from batchserve.logs import noted_warnings
from batchserve.native.cores import default_threads
from batchserve.native.instruction_set import multiplies_bfloat16
from batchserve.program.image_file import WrongLengthError
from batchserve.runner.model_folder import resolve_model
from batchserve.startup.compile_ahead import CompileAhead
from batchserve.startup.kept_programs import KeptPrograms, may_be_native
from batchserve.startup.prepared import PreparedModel, prepare_native

if TYPE_CHECKING:
    from batchserve.config import EngineConfig
    from batchserve.runner.loader import LoadedModel
    from batchserve.startup.kv_memory import Progress


def prepare(config: EngineConfig, say: Progress) -> PreparedModel:
    """Loads a model and makes it ready to run steps. Raises ConfigError, UnsupportedModelError."""
    say(f"loading {config.model}")
    folder = Path(resolve_model(config.model))
    programs = KeptPrograms(config, folder) if config.max_kept_bytes and may_be_native(config) else None
    kept = None if programs is None else programs.open(config.num_threads or default_threads())
    if kept is not None:
        try:
            return prepare_native(config, kept.facts, kept.tokenizer, kept.native, say)
        except WrongLengthError as error:
            say(f"the model is prepared again, for {error}")
    with noted_warnings() as notes:
        loaded = _load(config, say)
    if loaded.native is not None:
        prepared = prepare_native(config, loaded.plain(), loaded.tokenizer, loaded.native, say)
        if programs is not None:
            programs.keep(loaded, prepared.max_model_len, notes)
        return prepared
    from batchserve.startup.modules import prepare_modules

    return prepare_modules(config, loaded, say)


def _load(config: EngineConfig, say: Progress) -> LoadedModel:
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if multiplies_bfloat16() else "float32"
    with closing(CompileAhead(dtype, is_needed=may_be_native(config))) as ahead:
        from batchserve.runner.loader import load_model, weight_bytes  # and torch, which takes seconds

        check_weights_fit(config.model, weight_bytes(config))
        return load_model(config, say, ahead.wait)
