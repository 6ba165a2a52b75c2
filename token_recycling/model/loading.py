"""From what a user writes to what the library takes: a model, its tokenizer and prompts.

What is missing is reported before anything slow begins.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._util.text_stream import first_line
from . import gguf
from .sources import check_source, packed, resolved

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

STANDARD_INPUT = Path("-")


class Loaded(NamedTuple):
    """A model, ready to decode, and its tokenizer."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def context(self) -> int | None:
        """Number of tokens the model was made for, if its configuration says so."""
        from .info import model_info

        return model_info(self.model).max_length


class Prompt(NamedTuple):
    """A text to continue, and where it comes from."""

    name: str
    text: str


def load(
    name: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    device: str | None = None,
    threads: int | None = None,
    prepack: bool | None = None,
    reproducible: bool = False,
    device_map: str | Mapping[str, Any] | None = None,
) -> Loaded:
    """Load a model and its tokenizer from a local folder, a GGUF file or the hub: `model, tokenizer = load(name)`.

    A GGUF file is first unpacked into the user's cache folder, in float32. `dtype` defaults to float32 on a CPU, so
    that texts are exactly `generate`'s, and to the file's own elsewhere; `device` to the accelerator if there is one;
    `threads` to torch's choice; `prepack` and `reproducible` are as in `accelerate`. `device_map` is that of
    transformers' `from_pretrained`, in place of `device`: "auto" spreads a model that one card cannot hold over all of
    them. Raises ValueError with what is wrong, and UnsupportedModelError for a model that cannot be accelerated.
    """
    from . import prepacking
    from .info import UnsupportedModelError
    from .self_test import unsupported

    name = os.fspath(name)
    tokenizer = load_tokenizer(name)
    model = load_model(name, dtype, device, threads, device_map)
    reason = unsupported(model)
    if reason is not None:
        raise UnsupportedModelError(f"{name} cannot be accelerated: {reason}")
    prepacking.prepack(model, prepack, fixed=reproducible)
    return Loaded(model, tokenizer)


def load_model(
    name: str,
    dtype: str | torch.dtype | None,
    device: str | None,
    threads: int | None,
    device_map: str | Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """The model in evaluation mode; raises ValueError. Weights for an accelerator are read straight onto it, where the
    package accelerate is installed.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with_accelerate = importlib.util.find_spec("accelerate") is not None
    if device_map is not None and device is not None:
        raise ValueError(f"device and device_map cannot be combined, got {device!r} and {device_map!r}; give one")
    if device_map is not None and not with_accelerate:
        raise ValueError(f"device_map needs the package accelerate, got {device_map!r} without; pip install accelerate")
    place, source = _device("cpu" if device_map == "cpu" else device), resolved(name)
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = dtype or ("float32" if place.type == "cpu" else "auto")
    if device_map is None and place.type != "cpu" and with_accelerate:
        device_map = {"": place}
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=chosen, device_map=device_map)
        return (model.to(place) if device_map is None else model).eval()
    except Exception as error:  # a user's folder can be wrong in any way
        raise ValueError(f"expected a causal language model at {name}, got: {first_line(error)}") from error


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; raises ValueError."""
    from transformers import AutoTokenizer

    check_source(name)
    source = resolved(name)
    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:  # as above
        raise ValueError(f"expected a tokenizer at {name}, got: {first_line(error)}") from error


def tokenizer_beside(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer saved where a model was loaded from; None if there is none on this machine."""
    from transformers import AutoTokenizer

    if not model.name_or_path:
        return None
    try:
        return AutoTokenizer.from_pretrained(model.name_or_path, local_files_only=True)
    except Exception:  # none there, none on this machine, or one that cannot be read
        return None


def quieten() -> None:
    """Turn off transformers' own bars, and warnings that a user cannot act on; downloads still show theirs."""
    from huggingface_hub.utils import enable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    enable_progress_bars()


def load_configuration(name: str) -> PreTrainedConfig:
    """The configuration of a model, without its weights; raises ValueError."""
    from transformers import AutoConfig

    file = packed(name)
    if file is not None and not gguf.is_unpacked(file):
        return gguf.configuration(file)
    try:
        return AutoConfig.from_pretrained(resolved(name))
    except Exception as error:  # as above
        raise ValueError(f"expected the configuration of a model at {name}, got: {first_line(error)}") from error


def _device(name: str | None) -> torch.device:
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = [torch.device("cpu"), *([accelerator] if accelerator else [])]
    if name is None:
        return here[-1]
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    count = torch.accelerator.device_count() if device.type != "cpu" else 1
    available = ", ".join(place.type for place in here)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {name!r} is not available: {_why_no_cuda()}; available here: {available}")
    if device.type not in {place.type for place in here}:
        raise ValueError(f"device {name!r} is not available; choose one of {available}")
    if (device.index or 0) >= count:
        raise ValueError(f"device {name!r} does not exist: this machine has {count} of type {device.type}")
    return device


def _why_no_cuda() -> str:
    """Return why torch cannot use CUDA, and what to do about it."""
    import torch

    if torch.version.cuda is None:
        return (
            f"torch {torch.__version__} was built without CUDA; "
            "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        )
    return f"torch was built for CUDA {torch.version.cuda} and finds no NVIDIA GPU; run nvidia-smi to check the driver"


def encode(loaded: Loaded, prompt: Prompt, chat: bool) -> torch.Tensor:
    """A prompt as ids (1, length) on the model's device; raises ValueError if the model cannot continue it."""
    from .prefill import checked_prompt
    from .tree_model import TreeModel

    text = prompt.text
    if chat:
        message = {"role": "user", "content": text}
        text = str(loaded.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))
    # A chat template writes the special tokens itself.
    ids = loaded.tokenizer(text, return_tensors="pt", add_special_tokens=not chat)["input_ids"]
    ids = checked_prompt(ids, TreeModel(loaded.model))[None]
    if loaded.context is not None and ids.shape[1] >= loaded.context:
        raise ValueError(
            f"expected a prompt of fewer tokens than the model's context of {loaded.context}, "
            f"got {ids.shape[1]} ({prompt.name}); shorten it"
        )
    return ids


def uses_chat(loaded: Loaded, wanted: bool | None) -> bool:
    """Whether prompts go through the chat template: as wanted, else if there is one; raises ValueError without one."""
    has_template = bool(getattr(loaded.tokenizer, "chat_template", None))
    if wanted and not has_template:
        raise ValueError("expected a tokenizer with a chat template for --chat, got one without; use --raw")
    return has_template if wanted is None else wanted


def arguments(loaded: Loaded, ids: torch.Tensor, max_new_tokens: int, **more: Any) -> dict[str, Any]:
    """Arguments of `model.generate` for a prompt; at most as many new tokens as the model's context holds."""
    room = max_new_tokens if loaded.context is None else loaded.context - ids.shape[1]
    return {
        "input_ids": ids,
        "attention_mask": ids.new_ones(ids.shape),
        "max_new_tokens": min(max_new_tokens, room),
        "do_sample": False,
        **more,
    }


def load_matrix(loaded: Loaded, drafter: Any, path: Path) -> None:
    """Fill the drafter's matrix from a file if there is one; raises ValueError."""
    from ..recycling.matrix_file import fingerprint
    from .tree_model import TreeModel

    if not hasattr(drafter, "matrix") or not hasattr(drafter, "prepare"):
        raise ValueError(f"expected a drafter with a matrix for --matrix, such as recycling, got {drafter.name}")
    if path.is_dir():
        raise ValueError(f"expected a file for --matrix, got the folder {path}")
    matrix = drafter.prepare(TreeModel(loaded.model))
    if path.exists():
        matrix.load(path, tokenizer=fingerprint(loaded.tokenizer))


def read_prompts(texts: Sequence[str], paths: Sequence[Path]) -> list[Prompt]:
    """Prompts from arguments, else from files and all files of folders, else standard input, for which - stands
    everywhere; raises ValueError. Line ends at the end of a file or of standard input are dropped: they are the
    editor's.
    """
    if texts and paths:
        raise ValueError("expected a prompt as argument or a path of prompts, got both; leave one out")
    if not texts and not paths and sys.stdin.isatty():
        raise ValueError("expected a prompt, got none; give it as argument, as a file or on standard input")
    given = enumerate(texts, start=1)
    prompts = [_read(STANDARD_INPUT) if text == "-" else Prompt(f"argument {n}", text) for n, text in given]
    for path in paths if prompts else paths or [STANDARD_INPUT]:
        prompts += map(_read, _prompt_files(path))
    for prompt in prompts:
        if not prompt.text.strip():
            raise ValueError(f"expected a prompt, got an empty one ({prompt.name}); give a text to continue")
        if prompt.text.encode("utf-8", "ignore").decode() != prompt.text:
            raise _not_utf8(prompt.name)
    return prompts


def _prompt_files(path: Path) -> list[Path]:
    """The file itself, or the files of a folder; raises ValueError."""
    if path == STANDARD_INPUT or path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"expected a file or a folder of prompts, got {path}: there is none")
    files = sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    if not files:
        raise ValueError(f"expected a folder of prompt files, got {path}, which holds none")
    return files


def text_files(paths: Sequence[Path]) -> list[Path]:
    """The files among `paths` and, by name, all below the folders among them but hidden ones; standard input is one.
    Raises ValueError for a path that is neither, and for a folder without files.
    """
    found = []
    for path in paths:
        shown = [path]
        if path.is_dir():
            below = sorted(file for file in path.rglob("*") if file.is_file())
            shown = [file for file in below if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        elif path != STANDARD_INPUT and not path.is_file():
            raise ValueError(f"expected text files or folders of them, got {path}: there is none")
        if not shown:
            raise ValueError(f"expected a folder of text files, got {path}, which holds none")
        found += shown
    return found


def bytes_of(files: Sequence[Path]) -> int:
    """How much there is to read of these, as far as is known."""
    return sum(file.stat().st_size for file in files if file != STANDARD_INPUT)


def _read(path: Path) -> Prompt:
    """The prompt in a file, or on standard input; raises ValueError."""
    name = "standard input" if path == STANDARD_INPUT else path.name
    try:
        text = sys.stdin.read() if path == STANDARD_INPUT else path.read_text(encoding="utf-8")
        return Prompt(name, text.rstrip("\r\n"))
    except UnicodeDecodeError:
        raise _not_utf8(name) from None


def _not_utf8(name: str) -> ValueError:
    return ValueError(f"expected text in UTF-8, got something else ({name})")
