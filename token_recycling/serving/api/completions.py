"""`POST /v1/completions`: outputs that continue raw prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, ClassVar, TypeAlias

import torch
from pydantic import Discriminator, Field, Tag, model_validator
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ..._util.text_stream import decoded
from ..engine import Engine, Job
from ..errors import invalid
from ..generation import Generation
from ..logprobs import completion_logprobs
from ..output import Delta, Output
from ..protocol import AS_MANY_AS_FIT, MAX_CHOICES, REFUSED, ChoicesRequest, TokenId, Unsupported
from .common import ChoicesReply, Event, check_ids, generation_of, output_of

PREFIX = "cmpl-"
_DEFAULT_TOKENS = 16
"""As in OpenAI's API."""


def _kind_of_prompt(prompt: Any) -> str | None:
    """Return the kind of a prompt, judged by the first entry of a list; None for an invalid prompt."""
    if isinstance(prompt, str):
        return "text"
    if not isinstance(prompt, list):
        return None
    kinds: dict[type, str | None] = {str: "texts", list: "lists", dict: None}
    return kinds.get(type(prompt[0]), "ids") if prompt else "ids"


_Ids = Annotated[list[TokenId], Field(min_length=1)]
Prompt: TypeAlias = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES), Tag("texts")]
    | Annotated[_Ids, Tag("ids")]
    | Annotated[list[_Ids], Field(min_length=1, max_length=MAX_CHOICES), Tag("lists")],
    Discriminator(
        _kind_of_prompt,
        custom_error_type="prompt",
        custom_error_message="Input should be a string, a list of strings, token ids or a list of lists of token ids",
    ),
]


class CompletionRequest(ChoicesRequest):
    """`POST /v1/completions`."""

    prompt: Prompt = Field(description="Text, a list of texts, token ids, or a list of lists of token ids.")
    max_tokens: Annotated[int, Field(ge=0), AS_MANY_AS_FIT] | None = Field(
        None,
        description="Maximum number of output tokens; 0, with `echo`: only the prompt, scored with `logprobs`.",
    )
    echo: bool | None = Field(None, description="The output begins with the prompt.")
    add_special_tokens: bool | None = Field(None, description="vLLM: false adds no special tokens to a text prompt.")
    logprobs: int | None = Field(
        None, ge=0, le=5, description="Of the model itself, before penalties, temperature and truncation."
    )

    unsupported: ClassVar[Unsupported] = {
        **REFUSED,
        "suffix": ("write a fill-in-the-middle prompt in the model's own format", ("",)),
        "prompt_embeds": ("send text or token ids", ()),
    }

    @model_validator(mode="after")
    def _check_max_tokens(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise invalid("max_tokens", "must be >= 1, or 0 together with echo, got 0")
        return self

    @model_validator(mode="after")
    def _check_choices(self) -> CompletionRequest:
        if len(self.prompts) * (self.n or 1) > MAX_CHOICES:
            raise invalid("n", f"at most {MAX_CHOICES} choices per request, got {len(self.prompts)} prompts x {self.n}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or token ids."""
        prompt: Any = self.prompt
        return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


class CompletionReply(ChoicesReply):
    """Choices, each a text."""

    kind = kind_of_event = "text_completion"

    def __init__(self, engine: Engine, job: Job, body: CompletionRequest, generations: list[Generation]) -> None:
        super().__init__(engine, job, body, generations)
        self._logprobs = body.logprobs

    def begin(self) -> Iterable[Event]:
        return ()

    def push(self, index: int, delta: Delta) -> Iterable[Event]:
        if delta.pieces or delta.finish_reason or (delta.tokens and self._logprobs is not None):
            yield self._event([self._choice(index, delta)])

    def _choice(self, index: int, output: Delta) -> dict[str, Any]:
        scores = None
        if self._logprobs is not None:
            scores = completion_logprobs(self._tokenizer, output.tokens, output.offsets, self._logprobs)
        choice = {"index": index, "finish_reason": output.finish_reason, "text": output.of("text")}
        return {**choice, "logprobs": scores}


async def prepare(engine: Engine, body: CompletionRequest, job: Job) -> CompletionReply:
    """Return the response to a request; raise ApiError."""
    generations = []
    for prompt in body.prompts:
        ids = await asyncio.to_thread(_ids, engine, prompt, body.add_special_tokens is not False)
        generations.append(
            await generation_of(
                engine,
                job,
                body,
                ids,
                partial(_new_output, engine.loaded.tokenizer, body, prompt, ids),
                field="prompt",
                n=body.n,
                default_tokens=_DEFAULT_TOKENS,
                logprobs=body.logprobs,
                scores_prompt=bool(body.echo) and body.logprobs is not None,
            )
        )
    return CompletionReply(engine, job, body, generations)


def _new_output(
    tokenizer: PreTrainedTokenizerBase,
    body: CompletionRequest,
    prompt: str | list[int],
    ids: torch.Tensor,
    config: GenerationConfig,
) -> Output:
    output = output_of(tokenizer, body, ids, config)
    if body.echo:
        text = prompt if isinstance(prompt, str) else decoded(tokenizer, prompt)
        output.begin_with(text, scored=body.logprobs is not None)
    return output


def _ids(engine: Engine, prompt: str | list[int], special: bool) -> torch.Tensor:
    if isinstance(prompt, str):
        ids = engine.loaded.tokenizer(prompt, return_tensors="pt", add_special_tokens=special)["input_ids"]
        return ids.long()  # an empty prompt gives floats
    check_ids(engine, max(prompt), "prompt")
    return torch.tensor([prompt])
