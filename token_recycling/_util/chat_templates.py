"""Messages in the form that a chat template reads. Templates of models with pictures may read contents only as lists of
parts, and show nothing of a content that is text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

from .per_object import PerObject

T = TypeVar("T")


def per_template(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """Cache the results of a function of a tokenizer: one per tokenizer, until its chat template changes."""
    results = PerObject[T]()

    @wraps(function)
    def cached(tokenizer: Any) -> T:
        return results.get(tokenizer, str(tokenizer.chat_template), lambda: function(tokenizer))

    return cached


def readable(tokenizer: Any, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages, whose contents are texts, in the form that the tokenizer's chat template reads."""
    if not _reads_only_parts(tokenizer):
        return [*messages]
    return [{**message, "content": _parts(message["content"])} for message in messages]


@per_template
def _reads_only_parts(tokenizer: Any) -> bool:
    """Return whether the chat template shows text in parts, but not as such."""
    as_texts = [_shown(tokenizer, text) for text in ("one", "other")]
    in_parts = [_shown(tokenizer, _parts(text)) for text in ("one", "other")]
    return as_texts[0] == as_texts[1] and None not in in_parts and in_parts[0] != in_parts[1]


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _shown(tokenizer: Any, content: Any) -> str | None:
    """Return a rendered message; None if the template raises any exception."""
    try:
        return str(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
    except Exception:
        return None
