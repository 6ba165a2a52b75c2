"""Fields that vLLM and llama.cpp take beside OpenAI's, with the meaning that they have there."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints, model_validator

from .errors import invalid

_MOST_IDS = 128
_Written = Annotated[str, StringConstraints(min_length=1)]


class Ending(BaseModel):
    """When a text ends, and whether its beginning is looked for."""

    min_tokens: int | None = Field(
        None, ge=0, description="of vLLM: no end, and no id of `stop_token_ids`, before so many; not in a given form"
    )
    ignore_eos: bool | None = Field(
        None, description="of vLLM: the model's own end of text is a token as any other; not in a given form"
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, max_length=_MOST_IDS, description="of vLLM: ids that end the text too, which is shown without them"
    )
    cache_prompt: bool | None = Field(
        None, description="of llama.cpp: false takes nothing that was kept of earlier texts, and keeps nothing"
    )

    @model_validator(mode="after")
    def _least_before_most(self) -> Ending:
        most = getattr(self, "max_completion_tokens", None) or getattr(self, "max_tokens", None)
        if most is not None and (self.min_tokens or 0) > most:
            raise invalid("min_tokens", f"expected at most max_tokens, {most}, got {self.min_tokens}")
        return self

    def ends(self, eos: int | list[int] | None, vocabulary: int) -> int | list[int] | None:
        """The ids that end a text where `eos` are the model's own; raises ApiError for one that is none."""
        more = self.stop_token_ids or []
        if max(more, default=0) >= vocabulary:
            raise invalid("stop_token_ids", f"expected token ids below {vocabulary}, got {max(more)}")
        if not (more or self.ignore_eos):
            return eos
        own = [] if self.ignore_eos or eos is None else [eos] if isinstance(eos, int) else eos
        # transformers puts the model's own where there are none: an id that no token has ends nothing.
        return [*own, *more] or [vocabulary]


class Continuing(BaseModel):
    """How a chat's prompt ends, and how much is reasoned after it."""

    continue_final_message: bool | None = Field(
        None, description="of vLLM and transformers: the answer goes on with the last message, the assistant's own"
    )
    add_generation_prompt: bool | None = Field(
        None, description="of vLLM and transformers: false ends the prompt with the last message"
    )
    reasoning_effort: _Written | None = Field(None, description="for templates that read it")

    @model_validator(mode="after")
    def _goes_on_with_an_answer(self) -> Continuing:
        messages: Any = getattr(self, "messages", None)
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("add_generation_prompt", "expected false with continue_final_message, got true")
        if self.continue_final_message and (role := messages[-1].role) != "assistant":
            raise invalid("continue_final_message", f"expected a last message of the assistant, got one of the {role}")
        return self
