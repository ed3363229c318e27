"""Loads any causal LM that transformers supports, and its tokenizer. Modelling code is never copied or patched."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedModel

from batchserve.attention import interface
from batchserve.errors import BatchserveError, ConfigError, UnsupportedModelError
from batchserve.native import openmp
from batchserve.native.cores import default_threads
from batchserve.native.instruction_set import multiplies_bfloat16
from batchserve.runner import native_linear
from batchserve.runner.checkpoint import TensorInfo, read_config, read_tensors
from batchserve.runner.eos_tokens import add_tokenizer_eos_ids
from batchserve.runner.fused_linears import fuse_linears, plain_product, trial_fusion, watch_inputs
from batchserve.runner.generation_defaults import (
    check_readable,
    eos_token_ids,
    sampling_defaults,
    warn_of_unapplied,
)
from batchserve.runner.loading_report import (
    check_report,
    drop_towers,
    log_skipped_weights,
    suppress_warnings,
)
from batchserve.runner.model_folder import resolve_model
from batchserve.runner.model_kind import auto_class, check_dtypes, check_numbers, check_unquantised
from batchserve.runner.native import native_model
from batchserve.runner.native_linear import NativeLinear, Workspace, swap_linears
from batchserve.runner.probe import ModelProbe
from batchserve.runner.rope import LONGEST_MODEL_LEN, ServedLength, check_rope_config, context_limit
from batchserve.runner.served_model import ServedModel
from batchserve.runner.tokenizer import check_vocabulary, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from batchserve.config import EngineConfig
    from batchserve.program.model import NativeModel
    from batchserve.runner.compiled_tokenizer import AnyTokenizer
    from batchserve.runner.fused_linears import FusedLinears

logger = logging.getLogger(__name__)
CPU = torch.device("cpu")
CUDA_BUILD_WITHOUT_GPU = (
    "torch %s is built for CUDA, and no GPU can be used: the model runs on the CPU. Without a GPU, a new environment "
    "takes a fourth of the space with PyTorch's CPU build (README.md, 'Use')"
)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_CHARS = 1000  # of a library's message about a model


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel(ServedModel):
    """A model that passed the probe and is ready to run."""

    model: PreTrainedModel
    tokenizer: AnyTokenizer | None
    served_length: ServedLength
    has_packed_linears: bool
    device: torch.device = CPU
    native: NativeModel | None = None  # runs the steps in place of the model's modules

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def limit_model_len(self, max_model_len: int) -> None:
        """Limits the length of requests, in tokens. Memory may hold less than the model's own limit."""
        self.served_length.longest = max_model_len
        if self.native is not None:
            self.native.limit_model_len(max_model_len)


def resolve_device(config: EngineConfig) -> torch.device:
    """Returns the device to run on. Raises ConfigError if it, or one that the attention backend needs, is missing."""
    name, backend = config.device, config.attention_backend
    if name == "cpu" or backend == "cpu":
        return CPU
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if name == "cuda" or backend in ("flashinfer", "triton"):
        option = "device = 'cuda'" if name == "cuda" else f"attention_backend = {backend!r}"
        why = "is built without CUDA" if torch.version.cuda is None else "sees no CUDA device"
        raise ConfigError(f"{option}: must be on a machine with a CUDA device, and torch {torch.__version__} {why}")
    return CPU


def resolve_dtype(dtype: str, device: torch.device = CPU) -> torch.dtype:
    """Resolves "auto": bfloat16 if the device multiplies it natively, else float16 on a GPU and float32 on a CPU."""
    if dtype != "auto":
        return DTYPES[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    return torch.bfloat16 if multiplies_bfloat16() else torch.float32


@torch.inference_mode()
def load_model(
    config: EngineConfig,
    say: Callable[[str], None] = lambda message: None,
    wait_for_kernels: Callable[[], None] = lambda: None,
) -> LoadedModel:
    """Loads, probes and packs a model.

    Modules are packed only for the CPU's own attention backend. The GPU path runs them as they are, also on a CPU,
    except that linears of the same input are joined everywhere. wait_for_kernels: called before a native program is
    made, whose kernels are being compiled. A warning names the options of generation_config.json
    that no request gets. Raises ConfigError (cannot be loaded) or UnsupportedModelError (would answer wrongly).
    """
    interface.register()
    source = resolve_model(config.model)
    device = resolve_device(config)
    if device.type == "cpu" and torch.version.cuda is not None and not torch.cuda.is_available():
        logger.warning(CUDA_BUILD_WITHOUT_GPU, torch.__version__)
    dtype = resolve_dtype(config.dtype, device)
    num_threads = config.num_threads or default_threads()
    openmp.use_threads(num_threads)
    model = _load_weights(source, dtype, config)
    module: torch.nn.Module = model  # transformers' own to() is not annotated
    module.to(device)
    text_config = model.config.get_text_config()
    max_model_len = context_limit(text_config)
    if not 2 <= max_model_len <= LONGEST_MODEL_LEN:  # a token of the prompt and one of the answer
        raise ConfigError(
            f"model = {config.model!r}: its longest context is {max_model_len}, must be in 2..{LONGEST_MODEL_LEN}"
        )
    served_length = ServedLength(min(config.max_model_len or max_model_len, max_model_len))
    served_length.watch(model)
    probe = ModelProbe(model, served_length.longest)
    layers = probe.check_attention()
    vocab_size, num_parameters = int(text_config.vocab_size), count_parameters(model)
    native = None
    if has_cpu_backend(config, device) and config.custom_kernels:
        say("preparing the native program (its kernels are compiled at the first start)")
        wait_for_kernels()
        native = native_model(model, probe, layers, served_length.longest, num_threads)
    is_packed = native is None and has_cpu_backend(config, device) and dtype in native_linear.DTYPES
    if native is None:
        workspace = Workspace()
        fuse_linears(_find_siblings(model, probe), partial(NativeLinear, workspace) if is_packed else plain_product)
        if is_packed:
            swap_linears(model, workspace)
        probe.check_swapped()
        probe.check_mixed_batch()
    tokenizer = load_tokenizer(source, config)
    check_vocabulary(tokenizer, vocab_size, config)
    ends = eos_token_ids(model.generation_config.eos_token_id, text_config, vocab_size)
    if config.tokenizer_end_tokens:
        ends = add_tokenizer_eos_ids(ends, tokenizer, vocab_size)
    warn_of_unapplied(model.generation_config, max_model_len)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=config.served_model_name or config.model,
        architecture=type(model).__name__,
        dtype=str(dtype).removeprefix("torch."),
        layers=layers,
        num_heads=probe.num_heads,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=ends,
        served_length=served_length,
        defaults=sampling_defaults(model.generation_config),
        has_packed_linears=is_packed,
        device=device,
        has_sinks=probe.has_sinks,
        native=native,
        num_parameters=num_parameters,
        configuration=model.config.to_json_string(),
    )


def _find_siblings(model: PreTrainedModel, probe: ModelProbe) -> FusedLinears:
    """Finds linears that can be one product, and probes the result before the original weights are given up."""
    try:
        with watch_inputs(model) as watch:
            probe.run_tracked()
        siblings = watch.siblings(model)
        if not siblings:
            return []
        with trial_fusion(siblings):
            probe.check_swapped()
    except UnsupportedModelError as error:
        logger.info("linears of the same input stay apart: %s", error)
        return []
    return siblings


def has_cpu_backend(config: EngineConfig, device: torch.device) -> bool:
    """True if attention runs on the CPU's own backend, not on a kernel of the GPU path."""
    return device.type == "cpu" and config.attention_backend in ("auto", "cpu")


def _load_weights(source: str, dtype: torch.dtype, config: EngineConfig) -> PreTrainedModel:
    named = f"model = {config.model!r}"
    folder = Path(source)
    described_as = read_config(folder, named)
    check_readable(folder)
    check_rope_config(folder)
    kind = None
    try:
        with suppress_warnings() as held:
            check_unquantised(described_as, folder, named)
            read = AutoConfig.from_pretrained(source, trust_remote_code=config.trust_remote_code)
            kind = str(read.model_type)
            loads: Any = auto_class(read, folder, config.trust_remote_code, named)
            tensors = read_tensors(folder, described_as, named)
            check_dtypes(tensors, named)
            model, report = loads.from_pretrained(
                source,
                config=read,
                output_loading_info=True,
                dtype=dtype,
                attn_implementation="eager",
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below
                trust_remote_code=config.trust_remote_code,
            )
    except BatchserveError:
        raise
    except Exception as error:  # third-party files can fail in any way
        said = " ".join((described(error), *held[-1:]))[:MAX_CHARS]
        if kind is not None:
            raise UnsupportedModelError(f"{named} ({kind}): cannot be loaded: {said}") from error
        raise ConfigError(f"{named}: cannot be loaded: {said}") from error
    # transformers only warns, and goes on with random weights or without some of the files' tensors.
    check_numbers(model, tensors, named)
    log_skipped_weights(model, check_report(model, report, described_as, tensors, named), tensors)
    drop_towers(model)
    for each in (model.config, model.config.get_text_config()):
        each.return_dict = True  # the model may set it otherwise; outputs are read by name here
    ready: PreTrainedModel = model.eval()
    return ready


def count_parameters(model: PreTrainedModel) -> int:
    """Returns the number of distinct weights. One that layers share counts once."""
    return sum(each.numel() for each in model.parameters())


def weight_bytes(config: EngineConfig) -> int:
    """Returns the size of a folder's weights in the served dtype, from their headers; 0 if these cannot be read."""
    folder, named = Path(resolve_model(config.model)), f"model = {config.model!r}"
    tensors: dict[str, TensorInfo] = {}
    with suppress(BatchserveError):  # loading reports the error
        tensors = read_tensors(folder, read_config(folder, named), named)
    dtype = resolve_dtype(config.dtype, resolve_device(config))
    return sum(prod(each.shape) for each in tensors.values()) * dtype.itemsize


def described(error: Exception) -> str:
    """Returns an error's message in one line, with its type if the message says little without it."""
    enough = OSError, ValueError, ImportError, RuntimeError, SafetensorError, StrictDataclassError
    return " ".join((str(error) if isinstance(error, enough) else repr(error)).split())
