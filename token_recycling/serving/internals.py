"""Which parts of transformers' own server are used, and the check that this version of transformers has them.

The handlers of transformers check a request, make the prompt, call `generate` in a thread of its own and write the
answer. They are given a `ModelManager` that knows one model, and a `GenerateManager` that puts a `Job` where they
expect the model. Nothing else of that server is used, and nothing of it is changed.
"""

from __future__ import annotations

import importlib.util
import inspect
from typing import Any


def _found() -> dict[str, Any]:
    """The classes by their names; raises ImportError or AttributeError where one is missing."""
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


_PACKAGES = ("fastapi", "uvicorn", "openai", "prometheus_client", "jinja2")


def check_installed() -> None:
    """Raises ValueError if a package of the extra `serving` is missing, or if transformers' server differs from the
    supported one, with the difference.
    """
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"expected the extra 'serving', got no {', '.join(missing)}; pip install {' '.join(missing)}")
    import transformers

    try:
        found = _found()
    except ImportError as error:
        raise ValueError(
            f"expected the server of transformers 5.23 and what it needs, got that of {transformers.__version__} and: "
            f"{error}; install transformers 5.23 and newer versions of fastapi and openai"
        ) from error
    except AttributeError as error:
        raise _unsupported(str(error)) from error
    for name, methods in _EXPECTED.items():
        for method, expected in methods.items():
            parameters = tuple(inspect.signature(getattr(found[name], method, _missing)).parameters)
            if parameters != expected:
                raise _unsupported(f"{name}.{method}({', '.join(parameters)}) instead of ({', '.join(expected)})")


def _missing() -> None:
    """Stands for a missing method."""


def _unsupported(what: str) -> ValueError:
    import transformers

    return ValueError(
        f"expected the server of transformers 5.23, got that of {transformers.__version__}, with {what}; "
        "install transformers 5.23, or a newer version of token-recycling"
    )
