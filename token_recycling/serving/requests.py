"""The bodies of requests, and what becomes of each field: honoured as OpenAI defines it, without effect, or refused.

Every field of OpenAI's API is here; docs/serving.md has them as a table, which a test compares with this file. What is
not known is refused, so that no client is surprised by what was silently left out.
"""

from __future__ import annotations

import inspect
import re
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Field, StringConstraints, field_validator, model_validator
from transformers import PreTrainedTokenizerBase, SequenceBiasLogitsProcessor

from .answer_form import Formed
from .calling import Calling
from .errors import ApiError, invalid
from .given_config import MOST
from .json_values import check_json
from .of_others import Continuing, Ending
from .stopping import Stops
from .templates import Message, Part

MOST_TEXTS = 128
"""Texts of one request, as in OpenAI's API."""
_Text = Annotated[str, StringConstraints(min_length=1)]
_Id = Annotated[int, Field(ge=0)]


Refused = dict[str, tuple[str, tuple[Any, ...]]]
"""Fields that are refused: what to do instead, and the values that ask for what happens anyway."""


class Speculation(BaseModel, extra="forbid", strict=True):
    """How far a request is drafted for; its text is the same."""

    enabled: bool = True
    nodes: int | None = Field(None, ge=1)


class Prediction(BaseModel, extra="forbid", strict=True):
    """What is expected to be answered."""

    type: Literal["content"]
    content: str | list[Part]

    @property
    def text(self) -> str:
        """All of it."""
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class Body(BaseModel, extra="forbid", strict=True):
    """What all requests have in common."""

    model: str | None = Field(None, description="the name of the model; another is not found (404)")
    temperature: float | None = Field(
        None, ge=0, le=100, description="0 is greedy, above it draws; left out, as the model's own configuration says"
    )
    top_p: float | None = Field(None, gt=0, le=1, description="as OpenAI's; without a temperature it draws too")
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="equal seeds, equal texts, in 16 bits with `--reproducible`; choice `i` has the seed plus `i`",
    )
    stream: bool | None = Field(None, description="server-sent events, at the end `[DONE]`")
    generation_config: str | None = Field(
        None, description="of transformers' clients, JSON: as far as it says how tokens are chosen"
    )

    speculation: Speculation | None = Field(
        None, description="`enabled`: false decodes plainly; `nodes`: drafted tokens of a pass at most"
    )

    harmless: ClassVar[tuple[str, ...]] = ()
    """Fields that are taken and change nothing: they are about accounts and caches of OpenAI's."""
    refused: ClassVar[Refused] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_honoured(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise ApiError(
                400,
                "expected a JSON object with the header Content-Type: application/json, got a body of another kind",
                "invalid_body",
            )
        for name, value in data.items():
            check_json(name, value)
        for name, (instead, same) in cls.refused.items():
            if data.get(name) is not None and data[name] not in same:
                raise ApiError(400, f"{name}: this server does not support it; {instead}", "unsupported", name)
        # A field that is null is one that is left out.
        taken = {name: value for name, value in data.items() if value is not None}
        known = {name: value for name, value in taken.items() if name not in cls.refused and name not in cls.harmless}
        unknown = sorted(known.keys() - cls.model_fields.keys())
        if unknown and cls.model_config.get("extra") == "forbid":
            message = f"{unknown[0]}: expected a field of this API, got one that it does not have; leave it out"
            raise ApiError(400, message, "unknown_parameter", unknown[0])
        return known


class StreamOptions(BaseModel, extra="forbid", strict=True):
    """What a stream has beside its text."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class Sampling(Body, Ending):
    """How tokens are chosen, and when a text ends."""

    stop: Stops | None = Field(
        None, description="up to 16, each of up to 128 characters; the text ends before the first"
    )
    max_tokens: int | None = Field(None, ge=1, description="tokens of an answer at most")
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="taken off a token's logit for each time that the answer has it"
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2, description="taken off once, if the answer has the token")
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=MOST, description="added to the logits of token ids, up to 1,024"
    )
    top_k: int | None = Field(None, ge=-1, description="draws from the `k` likeliest; 0 and -1: from all")
    min_p: float | None = Field(
        None, ge=0, le=1, description="leaves out what is less likely than this share of the likeliest"
    )
    repetition_penalty: float | None = Field(
        None, gt=0, description="divides logits of tokens that stand in the prompt or the answer (CTRL)"
    )

    @field_validator("logit_bias")
    @classmethod
    def _of_ids(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for key in biases or ():
            if not re.fullmatch("[0-9]{1,9}", key):
                raise invalid("logit_bias", f"expected token ids as keys, got {key[:40]!r}")
        return biases

    @cached_property
    def bias(self) -> SequenceBiasLogitsProcessor | None:
        """`logit_bias`, for all texts of the request: making it takes a while."""
        biases = [[[int(token)], value] for token, value in (self.logit_bias or {}).items()]
        return SequenceBiasLogitsProcessor(biases) if biases else None


class _Completing(Sampling, Formed):
    n: int | None = Field(None, ge=1, le=MOST_TEXTS, description="choices, each a text of its own")
    stream_options: StreamOptions | None = Field(
        None, description="`include_usage`: usage in a last event; `include_obfuscation`: false alone"
    )

    harmless = (
        "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    )  # fmt: skip

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> _Completing:
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "expected them with stream=true, got them without; leave them out")
        return self


class TextBody(_Completing):
    """Of /v1/completions."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
        | Annotated[list[_Id], Field(min_length=1)]
        | Annotated[list[Annotated[list[_Id], Field(min_length=1)]], Field(min_length=1, max_length=MOST_TEXTS)]
    ) = Field(description="a text, a list of them, token ids, or a list of such lists")
    echo: bool | None = Field(None, description="the answer begins with the prompt")

    @field_validator("prompt", mode="before")
    @classmethod
    def _texts_or_ids(cls, prompt: Any) -> Any:
        flat = [prompt] if not isinstance(prompt, list) else prompt
        for one in [inner for outer in flat for inner in (outer if isinstance(outer, list) else [outer])]:
            if isinstance(one, bool) or not isinstance(one, (str, int)):
                got = type(one).__name__
                raise invalid("prompt", f"expected a text, a list of them, token ids, or lists of these, got {got}")
            if isinstance(one, int) and one < 0:
                raise invalid("prompt", f"expected token ids of 0 or more, got {one}")
        return prompt

    logprobs: int | None = Field(
        None, ge=0, le=5, description="of the model itself, before penalties, temperature and cuts"
    )

    refused = {
        "best_of": ("ask for n choices and choose", (1,)),
        "suffix": ("write what is to be filled in as the model's own prompt for it", ()),
        "prompt_embeds": ("give a text or token ids", ()),
    }

    @model_validator(mode="after")
    def _not_too_many(self) -> TextBody:
        if len(self.prompts) * (self.n or 1) > MOST_TEXTS:
            given = f"{len(self.prompts)} prompts with n={self.n}"
            raise invalid("n", f"expected at most {MOST_TEXTS} texts, got {given}")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each a text or token ids."""
        prompt: Any = self.prompt
        return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


class Templated(Body):
    """What goes through the chat template."""

    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="of transformers' clients: variables of the template"
    )

    @model_validator(mode="after")
    def _variables_only(self) -> Templated:
        """Refuses arguments of `apply_chat_template`, above all another template."""
        arguments = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
        taken = sorted((arguments | {"messages"}) & (self.chat_template_kwargs or {}).keys())
        if taken:
            raise invalid("chat_template_kwargs", f"expected variables of the template, got {', '.join(taken)}")
        return self


class ChatBody(_Completing, Templated, Continuing, Calling):
    """Of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, description="text parts alone")
    max_completion_tokens: int | None = Field(
        None, ge=1, description="tokens of an answer at most, before `max_tokens`"
    )
    logprobs: bool | None = Field(None, description="of the model itself, before penalties, temperature and cuts")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="with `logprobs`")
    prediction: Prediction | None = Field(
        None, description="what is drafted from before all else; the model never reads it"
    )

    refused = {
        "functions": ("use tools", ()),
        "function_call": ("use tool_choice", ()),
        "verbosity": ("say it in a message", ("medium",)),
        "modalities": ("answers are text", (["text"],)),
        "audio": ("answers are text", ()),
        "web_search_options": ("leave it out", ()),
        "moderation": ("leave it out", ()),
        "service_tier": ("leave it out", ("auto", "default")),
        "store": ("nothing is stored", (False,)),
    }

    @model_validator(mode="after")
    def _top_of_what(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "expected them with logprobs=true, got them without")
        return self


class StepsBody(Sampling, Formed):
    """Of /v1/token_recycling/steps: the prompt as a text, or as messages of a chat."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    drafter: _Text = "accelerated"

    @model_validator(mode="after")
    def _one_prompt(self) -> StepsBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("expected a prompt or messages, one of both")
        return self
