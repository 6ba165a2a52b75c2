"""Which parts of transformers' own server are used, and the check that this version of transformers has them.

The handler of responses checks a request, makes the prompt, calls `generate` in a thread of its own and writes the
answer. It is given a `ModelManager` that knows one model, and a `GenerateManager` that puts a `Job` where it expects
the model. For chats, what transformers knows of how models write reasoning and tool calls is used. Nothing else of that
server is used, and nothing of it is changed.
"""

from __future__ import annotations

import importlib
import inspect

from .._util.extras import lacking

_EXPECTED: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("response", "ResponseHandler"): {
        "__init__": ("self", "model_manager", "generation_state", "chat_template_kwargs"),
        "handle_request": ("self", "body", "request_id"),
        "_build_generation_config": ("self", "body", "model_generation_config", "use_cb"),
        "get_processor_inputs_from_messages": ("messages", "modality"),
    },
    ("model_manager", "ModelManager"): {
        "process_model_name": ("model_id",),
        "load_model_and_processor": ("self", "model_id_and_revision", "progress_callback", "tqdm_class", "gguf_file"),
        "get_model_modality": ("model", "processor"),
    },
    ("utils", "GenerateManager"): {
        "__init__": ("self",),
        "generate_streaming": ("self", "model", "processor", "inputs", "gen_config", "request_id", "response_parser"),
        "generate_non_streaming": ("self", "model", "processor", "inputs", "gen_config", "request_id"),
        "async_submit": ("self", "fn", "args", "kwargs"),
        "submit": ("self", "fn", "args", "kwargs"),
    },
    ("utils", "GenerationState"): {"get_manager": ("self", "model_id", "use_cb")},
}  # fmt: skip
"""The parameters of every method that is called or replaced."""
_FUNCTIONS = {
    "build_response_parser": ("processor", "model", "input_ids", "tools"),
    "get_response_template": ("processor", "model"),
    "response_events_to_chunks": ("events",),
}
"""The parameters of every function of its module `utils` that is called."""


def check_installed() -> None:
    """Raises ValueError if a package of the extra `serving` is missing, or if transformers' server differs from the
    supported one, with the difference.
    """
    if missing := lacking("serving", "fastapi", "uvicorn", "openai", "prometheus_client", "jinja2"):
        raise ValueError(f"serving {missing}")
    from transformers import __version__ as version

    try:
        difference = _difference()
    except ImportError as error:
        raise ValueError(
            f"expected the server of transformers 5.23 and what it needs, got that of {version} and: "
            f"{error}; install transformers 5.23 and newer versions of fastapi and openai"
        ) from error
    if difference is not None:
        raise ValueError(
            f"expected the server of transformers 5.23, got that of {version}, with {difference}; "
            "install transformers 5.23, or a newer version of token-recycling"
        )


def _difference() -> str | None:
    """The first difference of transformers' server from the supported one; raises ImportError."""
    kinds = []
    for module, name in _EXPECTED:
        try:
            kinds.append(getattr(importlib.import_module(f"transformers.cli.serving.{module}"), name))
        except AttributeError as error:
            return str(error)
    for kind, methods in zip(kinds, _EXPECTED.values(), strict=True):
        for method, expected in methods.items():
            found = tuple(inspect.signature(getattr(kind, method, lambda: None)).parameters)
            if found != expected:
                return f"{kind.__name__}.{method}({', '.join(found)}) instead of ({', '.join(expected)})"
    utils = importlib.import_module("transformers.cli.serving.utils")
    for name, expected in _FUNCTIONS.items():
        found = tuple(inspect.signature(getattr(utils, name, lambda: None)).parameters)
        if found != expected:
            return f"{name}({', '.join(found)}) instead of ({', '.join(expected)})"
    return None
