"""What is used of transformers' own server, in one place, and whether this version of transformers has it.

The handlers of transformers check a request, make the prompt, call `generate` in a thread of its own and write the
answer. They are given a `ModelManager` that knows one model, and a `GenerateManager` that puts a `Job` where they
expect the model. Nothing else of that server is used, and nothing of it is changed.
"""

from __future__ import annotations

import inspect
from typing import Any

import transformers


def _found() -> dict[str, Any]:
    """The parts by their names; raises ImportError or AttributeError where one is not there."""
    from transformers.cli.serving import chat_completion, completion, model_manager, response, utils

    return {
        "ChatCompletionHandler": chat_completion.ChatCompletionHandler,
        "CompletionHandler": completion.CompletionHandler,
        "ResponseHandler": response.ResponseHandler,
        "ModelManager": model_manager.ModelManager,
        "GenerateManager": utils.GenerateManager,
        "GenerationState": utils.GenerationState,
    }


_HANDLER = {
    "__init__": ("self", "model_manager", "generation_state", "chat_template_kwargs"),
    "handle_request": ("self", "body", "request_id"),
    "_build_generation_config": ("self", "body", "model_generation_config", "use_cb"),
}
_EXPECTED: dict[str, dict[str, tuple[str, ...]]] = {
    "ChatCompletionHandler": _HANDLER,
    "CompletionHandler": _HANDLER,
    "ResponseHandler": _HANDLER,
    "ModelManager": {
        "process_model_name": ("model_id",),
        "load_model_and_processor": ("self", "model_id_and_revision", "progress_callback", "tqdm_class", "gguf_file"),
        "get_model_modality": ("model", "processor"),
    },
    "GenerateManager": {
        "__init__": ("self",),
        "generate_streaming": (
            "self", "model", "processor", "inputs", "gen_config", "request_id", "response_parser",
        ),
        "generate_non_streaming": ("self", "model", "processor", "inputs", "gen_config", "request_id"),
        "async_submit": ("self", "fn", "args", "kwargs"),
        "submit": ("self", "fn", "args", "kwargs"),
    },
    "GenerationState": {"get_manager": ("self", "model_id", "use_cb")},
}  # fmt: skip
"""The parameters of every method that is called or replaced."""


def check_transformers() -> None:
    """Raises ImportError, with what is different, if this version's server is not the one that is known."""
    why = None
    try:
        found = _found()
        for name, methods in _EXPECTED.items():
            for method, expected in methods.items():
                parameters = tuple(inspect.signature(getattr(found[name], method)).parameters)
                if why is None and parameters != expected:
                    why = f"{name}.{method}({', '.join(parameters)}) instead of ({', '.join(expected)})"
    except (ImportError, AttributeError) as error:
        why = str(error)
    if why is not None:
        raise ImportError(
            f"expected the server of transformers 5.23, got that of {transformers.__version__}, with {why}; "
            "install transformers 5.23, or a newer version of token-recycling"
        )
