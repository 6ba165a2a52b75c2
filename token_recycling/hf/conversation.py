"""A conversation with a model through its chat template, with a prefix cache over its turns.

A chat template renders the whole conversation for every turn. Leading tokens whose keys and values are cached from
earlier turns (`model.prefixes`) are not prefilled again, unless the model has changed since. A turn costs the new
tokens: the question, and the part of the last answer that the template renders differently. The prompt is always the
template's, so the output equals that of a cold cache; in 16 bits near-ties may resolve differently, as between any two
ways to prefill.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from .._util.chat_templates import readable
from .._util.text_stream import IncrementalText, StepRecorder, decoded, one_line
from ..drafters._base import Drafter
from ..loop.request import Hints
from ..loop.stats import Stats
from ..model.backend import Fast
from ..model.facts import times_written
from ..model.info import UnsupportedModelError
from ..model.prefill import checked_prompt
from ..model.prefixes import own_prefixes
from ..model.prepacking import prepack as prepack_weights
from ..model.state import state_of
from .accelerate import prepared
from .acceleration import view

_MOST_TOKENS = 256
"""Maximum tokens of an answer by default."""
_MOST_ROWS = 1_000_000
"""Maximum compared rows of a tensor. Quantized weights may have one row per byte: they are sampled."""


@dataclass(frozen=True)
class Turn:
    """Record of one answer."""

    arguments: dict[str, Any]
    """The arguments of `model.generate` that give the same answer from a cold cache."""
    cached: int
    """Tokens of the prompt that were already cached."""
    tokens: list[int]
    """Tokens of the answer, including the end of sequence."""
    stats: Stats
    """Statistics of the decoding."""


class Conversation:
    """Turns of a chat that share a prefix cache.

    `messages` holds the conversation, as `{"role": ..., "content": ...}`, and may be edited between turns: an unchanged
    prefix stays cached. `last` is the last `Turn`, or None; `acceleration` has the drafter. Not thread-safe.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: str | Drafter = "recycling",
        *,
        system: str | None = None,
        fast: Fast = "auto",
        prepack: bool | None = None,
        **arguments: Any,
    ) -> None:
        """`arguments` are those of `model.generate` for every answer; if neither they nor a `generation_config` among
        them limit the length, an answer has at most 256 tokens. `system` is the text of the system message. `fast` and
        `prepack` are as in `accelerate`. The model itself is not accelerated.

        Raises UnsupportedModelError, and ValueError for a tokenizer without a chat template.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template, which a conversation needs; continue prompts with `generate`"
            )
        self.model, self.tokenizer = model, tokenizer
        self.arguments: dict[str, Any] = arguments
        self.acceleration = prepared(model, drafter, fast)
        prepack_weights(model, prepack, fixed=self.acceleration.drafter.traits.isolates_requests)
        self._target = self.acceleration.examine(model)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._read_by = self._state()
        """State of the model when it read the earlier turns."""
        self.reset()

    def reset(self) -> None:
        """Start a new conversation, with only the system message."""
        self.messages: list[dict[str, str]] = [*self._system]
        self.last: Turn | None = None
        self._forget_prefixes()

    def _state(self) -> list[Any]:
        """Return a value that equals later ones while the model computes the same keys and values of a text."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return [*map(_content, tensors), *state_of(self._target, keep=True)]

    def _forget_prefixes(self) -> None:
        with contextlib.suppress(UnsupportedModelError):  # the next call then runs through `generate`
            self._target = self.acceleration.examine(self.model)
        self.acceleration.hints = Hints(own_prefixes(self._target))

    def say(self, text: str, on_text: Callable[[str], Any] | None = None, **arguments: Any) -> str:
        """Return the answer to `text`; both become messages. `on_text` is called with each piece of the answer;
        `arguments` apply to this turn only. An answer ends at the model's context length, unless `max_length` is given
        or `max_new_tokens` is None, or with KeyboardInterrupt, which is raised again; after any other error the
        conversation is unchanged. Raises ValueError if the context is full, if the template rejects the conversation,
        or for several answers.
        """
        if self._read_by != self._state():
            self._forget_prefixes()
        question = {"role": "user", "content": text}
        ids = self._encoded([*self.messages, question])
        call_arguments = self._call_arguments(ids, arguments)
        shown = IncrementalText(self.tokenizer)

        def show(piece: str) -> None:
            if piece and on_text is not None:
                on_text(piece)

        recorder = StepRecorder(lambda tokens: show(shown.push(tokens)))
        try:
            view(self.model, self.acceleration).generate(**call_arguments, streamer=recorder)
            show(shown.flush())
        except KeyboardInterrupt:
            if recorder.tokens:
                self._keep(question, call_arguments, recorder.tokens)
            raise
        finally:
            self._read_by = self._state()
            if self.acceleration.fallback is not None:  # as with code that may have changed the model during the turn
                self._forget_prefixes()
        return self._keep(question, call_arguments, recorder.tokens)

    def _keep(self, question: dict[str, str], call_arguments: dict[str, Any], tokens: list[int]) -> str:
        answer, stats = decoded(self.tokenizer, tokens), self.acceleration.stats
        self.messages += [question, {"role": "assistant", "content": answer}]
        self.last = Turn(call_arguments, stats.cached_tokens, tokens, stats)
        return answer

    def _encoded(self, messages: list[dict[str, str]]) -> torch.Tensor:
        """Return the conversation as ids (length,), up to where the answer begins."""
        try:
            inputs = self.tokenizer.apply_chat_template(
                readable(self.tokenizer, messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # a template can fail in any way
            raise ValueError(
                f"the chat template rejects these messages: {type(error).__name__}: {one_line(error)}"
            ) from error
        return checked_prompt(inputs["input_ids"], self._target)

    def _call_arguments(self, ids: torch.Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of `model.generate` for a prompt; new tokens are limited by the model's context."""
        call_arguments = {**self.arguments, **arguments}
        if not call_arguments.keys() & {"max_new_tokens", "max_length"}:
            config = call_arguments.get("generation_config") or GenerationConfig()
            if config.max_new_tokens is not None:
                call_arguments["max_new_tokens"] = config.max_new_tokens
            elif config.max_length is None:
                call_arguments["max_new_tokens"] = _MOST_TOKENS
        context = self._target.max_length
        if context is not None:
            if len(ids) >= context:
                raise ValueError(
                    f"the conversation must have fewer tokens than the model's context of {context}, got {len(ids)}; "
                    "start a new one with reset(), or /reset in `chat`"
                )
            if call_arguments.get("max_new_tokens") is not None:  # else max_length or the generation config decides
                call_arguments["max_new_tokens"] = min(call_arguments["max_new_tokens"], context - len(ids))
        prompt = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
        return {**prompt, "tokenizer": self.tokenizer, **call_arguments}  # for stop strings


def _content(tensor: torch.Tensor) -> tuple[int, bytes]:
    """Return how often a tensor was written to, and one number of every row and column: torch does not count all
    writes, which usually change whole rows or columns, as of a token or a neuron.
    """
    numbers = b""
    with contextlib.suppress(Exception):  # tensors of other libraries, and meta tensors, can fail in any way
        values = torch.atleast_2d(tensor.detach()).flatten(0, -2)
        rows, columns = values.shape
        some = torch.cat([values[:: 1 + rows // _MOST_ROWS, columns // 2], values[rows // 2]])
        numbers = some.to("cpu", torch.float32).numpy().tobytes()
    return times_written(tensor), numbers
