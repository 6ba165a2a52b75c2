"""Requests of the HTTP API as pydantic models: the common fields, and the chat request, to which the other chat APIs
are converted. Requests of the other APIs are defined in their modules in `api`; messages and tools in `conversation`.

Clients send many fields by default that are only hints. An unknown field is ignored, with one warning per field and
process. An unsupported field that would change the meaning of the output is an error.
"""

from __future__ import annotations

import inspect
import json
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeAlias

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import from_json
from transformers import PreTrainedTokenizerBase, SequenceBiasLogitsProcessor

from .conversation import Message, Object, Part, ToolChoice, Tools, joined
from .errors import ApiError, invalid, refusal, shown, warn_ignored

MAX_CHOICES = 128
"""Maximum number of choices per request, as in OpenAI's API."""
MAX_ENTRIES = 1024
"""Maximum number of entries of a list that changes logits: each entry costs time at every step."""
_MAX_STOP_IDS = 128

Unsupported: TypeAlias = dict[str, tuple[str, tuple[Any, ...]]]
"""Rejected fields: the remedy, and the values that are accepted since they ask for the default behavior."""
NonemptyText = Annotated[str, StringConstraints(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
AS_MANY_AS_FIT = BeforeValidator(lambda value: 2**31 - 1 if value == -1 else value)
"""Reads -1 as "no limit", like llama.cpp and LM Studio."""
TokenLimit = Annotated[int, Field(ge=1), AS_MANY_AS_FIT]
"""Maximum number of output tokens."""
_Divisor = Annotated[float, Field(ge=1e-6, le=1e6)]
"""Bounded, since logits divided by a much smaller number become infinite."""


class Form(NamedTuple):
    """A grammar to compile: arguments of `grammar.compile.compiled` or, for output parts, of `grammar.parts`."""

    kind: str
    """One of the kinds of `compiled`, or `parts`."""
    definition: Any
    strict: bool


class Constraint(NamedTuple):
    """The form that an output must have, and the field of the request that asks for it."""

    field: str
    form: Form


def _greedy_or_divisor(value: float) -> float:
    if value and not 1e-6 <= value <= 1e6:
        raise ValueError(f"must be 0 (greedy) or from 1e-06 to 1000000, got {value}")
    return value


_Temperature = Annotated[float, AfterValidator(_greedy_or_divisor)]
_ANY_OBJECT = {"type": "object", "additionalProperties": True}


def _stop_list(stops: str | list[str]) -> list[str]:
    """Return stop strings as a list without the empty strings, which clients send for "no stop string"."""
    return [stop for stop in ([stops] if isinstance(stops, str) else stops) if stop]


_Stop = Annotated[str, StringConstraints(max_length=128)]
Stops = Annotated[_Stop | Annotated[list[_Stop], Field(max_length=64)], AfterValidator(_stop_list)]
"""Stop strings: one string or a list."""


class Fields(BaseModel):
    """A JSON object of a request: null means absent; unknown fields are ignored with a warning."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)
    unsupported: ClassVar[Unsupported] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        for name in data.keys() - fields:
            remedy, accepted = cls.unsupported.get(name, ("", ()))
            if data[name] is None or data[name] in accepted:
                continue
            if name in cls.unsupported:
                raise ApiError(400, f"{name} is not supported: {remedy}", "unsupported", name)
            warn_ignored(name)
        return {name: _whole_numbers(value) for name, value in data.items() if name in fields and value is not None}


def _whole_numbers(value: Any) -> Any:
    """Return a value with integral floats, also those in lists, as integers: some clients write 5.0 for 5."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return [_whole_numbers(item) for item in value] if isinstance(value, list) else value


# Output formats


class JsonSchema(BaseModel, extra="allow"):
    """A named schema."""

    schema_: Object = Field(alias="schema")
    strict: bool | None = None


class OutputFormat(BaseModel, extra="allow"):
    """An output format. Its schema is in `schema` or, as in OpenAI's chat API, in `json_schema`; llama.cpp's clients
    send a schema with `json_object` too.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Object | None = Field(None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _complete(self) -> OutputFormat:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("the type json_schema needs a schema, got none")
        return self

    def stated(self) -> Object:
        """Return the format as the client sent it."""
        return self.model_dump(exclude_unset=True, by_alias=True)

    @property
    def form(self) -> Form | None:
        """The grammar to compile; None for text."""
        if self.type == "json_object":
            return Form("json_schema", self.schema_ or _ANY_OBJECT, self.schema_ is None)
        if self.type == "json_schema":
            schema = self.json_schema or JsonSchema(schema=self.schema_ or {}, strict=self.strict)
            return Form("json_schema", schema.schema_, bool(schema.strict))
        return None


class FormatOptions(Fields):
    """The object that contains the output format in /v1/responses and /v1/messages."""

    format: OutputFormat | None = None


def _schema_of(value: Any) -> Any:
    """Return a schema, parsed if it is a JSON string."""
    if not isinstance(value, str):
        return value
    try:
        return from_json(value, allow_inf_nan=False)
    except ValueError as error:
        raise ValueError(f"the schema is not JSON: {error}, got {shown(value)}") from None


_Schema = Annotated[Object, BeforeValidator(_schema_of)]
_Choices = Annotated[list[NonemptyText], Field(min_length=1, max_length=MAX_ENTRIES)]


class StructuredOutputs(Fields):
    """The output format as vLLM's clients send it: exactly one of these fields."""

    unsupported: ClassVar[Unsupported] = {
        "structural_tag": ("use tools, or one of the other formats", ()),
        "whitespace_pattern": ("omit it", ("",)),
    }

    json_: _Schema | None = Field(None, alias="json")
    regex: NonemptyText | None = None
    choice: _Choices | None = None
    grammar: NonemptyText | None = None
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        formats = self.model_dump(exclude_none=True)
        if len(formats) != 1:
            names = ", ".join(name.rstrip("_") for name in formats) or "none"
            raise ValueError(f"exactly one of json, regex, choice, grammar, json_object is needed, got {names}")
        return self

    @property
    def form(self) -> Form:
        """The grammar to compile."""
        ((name, value),) = self.model_dump(exclude_none=True).items()
        if name == "json_object":
            return Form("json_schema", _ANY_OBJECT, True)
        if name == "json_":
            return Form("json_schema", value, False)
        if name == "choice":
            # A JSON string is also a valid string literal of the grammar.
            return Form(
                "grammar", "root ::= " + " | ".join(json.dumps(choice, ensure_ascii=False) for choice in value), True
            )
        return Form(name, value, True)


# Sampling and stopping


class Speculation(Fields):
    """Drafting limits of a request; the output is unaffected."""

    enabled: bool = True
    nodes: int | None = Field(None, ge=1)


REFUSED: Unsupported = {
    # Other sampling methods
    "allowed_token_ids": ("use logit_bias", ([],)),
    "bad_words": ("use logit_bias", ([],)),
    "do_sample": ("use temperature; 0 is greedy", ()),
    "use_beam_search": ("omit it", (False,)),
    "length_penalty": ("it applies to beam search; omit it", (1,)),
    "best_of": ("request n choices and select one", (0, 1)),
    "repeat_penalty": ("use repetition_penalty", (1,)),
    "no_repeat_ngram_size": ("omit it", (0,)),
    **dict.fromkeys(("typical_p", "tfs_z", "guidance_scale", "encoder_repetition_penalty"), ("omit it", (1,))),
    **dict.fromkeys(
        ("top_a", "mirostat", "mirostat_mode", "dynatemp_range", "dry_multiplier", "xtc_probability", "eta_cutoff",
         "epsilon_cutoff", "smoothing_factor", "penalty_alpha"),
        ("omit it", (0,)),
    ),
    "top_n_sigma": ("omit it", (-1, 0)),
    "logits_processors": ("omit it", ([],)),
    # Other names and stopping criteria
    **dict.fromkeys(("n_predict", "num_predict", "max_new_tokens", "max_length"), ("use max_tokens", (-1,))),
    "min_new_tokens": ("use min_tokens", (0,)),
    **dict.fromkeys(("stop_regex", "stop_words"), ("use stop", ("", []))),
    "no_stop_trim": ("use include_stop_str_in_output", (False,)),
    # Other prompts
    "chat_template": ("the operator sets it with --chat-template", ("",)),
    "template": ("the operator sets it with --chat-template", ("",)),
    "system": ("send a message with the role system", ("",)),
    "documents": ("include them in a message", ([],)),
    "images": ("this server accepts text only", ([],)),
    "truncate_prompt_tokens": ("shorten the prompt", ()),
    "enable_thinking": ("use chat_template_kwargs", ()),
    # Other outputs
    "prompt_logprobs": ("use echo and logprobs of /v1/completions", ()),
    "skip_special_tokens": ("omit it", (True,)),
    "return_full_text": ("use echo of /v1/completions", (False,)),
    "moderation": ("omit it: nothing is moderated", ()),
    "web_search_options": ("omit it: nothing is searched", ()),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object", "structural_tag",
         "json_schema", "regex", "grammar", "ebnf", "format"),
        ("use structured_outputs or response_format", ("",)),
    ),
    "generation_config": ("send its fields as fields of the request", ()),
    "options": ("send its fields as fields of the request", ({},)),
}  # fmt: skip
"""Fields of other servers that would change the output, with the remedy and the values that have no effect."""


class Request(Fields):
    """The fields that all requests share: sampling, stopping, output format."""

    model: str | None = Field(None, description="Name of the model; any other name is an error (404).")
    temperature: _Temperature | None = Field(
        None, ge=0, le=100, description="0 is greedy; default: the model's own generation configuration."
    )
    top_p: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Nucleus sampling threshold, 0: the most probable token; samples even without a temperature.",
    )
    top_k: int | None = Field(None, ge=-1, description="Samples from the `k` most probable tokens; 0 and -1: from all.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Drops tokens less probable than this fraction of the top token."
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="Equal seeds give equal outputs, in 16 bits only with `--reproducible`; choice `i` has seed + `i`. "
        "-1: a random seed.",
    )
    stream: bool | None = Field(None, description="Stream the output as server-sent events.")
    stop: Stops | None = Field(
        None,
        description="Up to 64 strings of up to 128 characters; the content ends before the first match.",
    )
    include_stop_str_in_output: bool | None = Field(None, description="vLLM: the output includes the stop string.")
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted from a token's logit for each occurrence in the output."
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted once if the output contains the token."
    )
    logit_bias: (
        dict[
            Annotated[str, StringConstraints(pattern="^[0-9]{1,9}$")],
            Annotated[float, Field(ge=-100, le=100)],
        ]
        | None
    ) = Field(None, max_length=MAX_ENTRIES, description="Added to the logits of token ids.")
    repetition_penalty: _Divisor | None = Field(
        None, description="Divides logits of tokens in the prompt or the output (CTRL)."
    )
    min_tokens: int | None = Field(None, ge=0, description="vLLM: minimum number of output tokens.")
    ignore_eos: bool | None = Field(None, description="vLLM: the model's end token does not end the output.")
    stop_token_ids: list[TokenId] | None = Field(
        None, max_length=_MAX_STOP_IDS, description="vLLM: token ids that end the output and are not shown."
    )
    cache_prompt: bool | None = Field(None, description="llama.cpp: false neither reads nor fills the prefix cache.")
    response_format: OutputFormat | None = Field(None, description="`text`, `json_object` or `json_schema`.")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="vLLM: one of `json`, `regex`, `choice`, `grammar`, `json_object`."
    )
    speculation: Speculation | None = Field(
        None, description="`enabled`: false decodes without drafts; `nodes`: maximum drafted tokens per forward pass."
    )

    unsupported: ClassVar[Unsupported] = REFUSED
    _format_field: str = PrivateAttr("response_format")
    """The API's name of `response_format`."""

    @model_validator(mode="before")
    @classmethod
    def _json_object(cls, data: Any) -> Any:
        if isinstance(data, bytes):
            raise ApiError(400, "the header Content-Type must be application/json", "invalid_body")
        return data

    @model_validator(mode="after")
    def _consistent(self) -> Request:
        limit = self.limit
        if limit is not None and (self.min_tokens or 0) > limit:
            raise invalid("min_tokens", f"must be <= max_tokens ({limit}), got {self.min_tokens}")
        if self.structured_outputs and self.response_format and self.response_format.form:
            raise invalid("structured_outputs", f"cannot be combined with {self._format_field}; omit one of them")
        return self

    @property
    def limit(self) -> int | None:
        """The requested maximum number of output tokens."""
        return None

    @property
    def constraint(self) -> Constraint | None:
        """The output format; None for free text."""
        if self.structured_outputs is not None:
            return Constraint("structured_outputs", self.structured_outputs.form)
        form = None if self.response_format is None else self.response_format.form
        return None if form is None else Constraint(self._format_field, form)

    @cached_property
    def bias(self) -> SequenceBiasLogitsProcessor | None:
        """`logit_bias` as a logits processor, shared by all choices because it is costly to create."""
        biases = [[[int(token)], value] for token, value in (self.logit_bias or {}).items()]
        return SequenceBiasLogitsProcessor(biases) if biases else None

    def ends(self, eos: int | list[int] | None, vocabulary: int) -> int | list[int] | None:
        """Return the token ids that end the output, given the model's own `eos`; raise ApiError for an unknown id."""
        more = self.stop_token_ids or []
        if max(more, default=0) >= vocabulary:
            raise invalid("stop_token_ids", f"token ids must be < {vocabulary}, got {max(more)}")
        if not (more or self.ignore_eos):
            return eos
        own = [] if self.ignore_eos or eos is None else [eos] if isinstance(eos, int) else eos
        # With no ids, transformers would fall back to the model's own. An id outside the vocabulary ends nothing.
        return [*own, *more] or [vocabulary]


class StreamOptions(Fields):
    """Options of a stream."""

    include_usage: bool | None = None


class ChoicesRequest(Request):
    """A request for several choices."""

    max_tokens: TokenLimit | None = Field(None, description="Maximum number of output tokens.")
    n: int | None = Field(None, ge=1, le=MAX_CHOICES, description="Number of choices.")
    stream_options: StreamOptions | None = Field(None, description="`include_usage`: usage in a final event.")

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)


class Prediction(Fields):
    """Text that the output is expected to match."""

    type: Literal["content"]
    content: str | list[Part]

    @property
    def text(self) -> str:
        """The whole text."""
        return joined(self.content)


_TEMPLATE_ARGUMENTS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}


def _variables_only(variables: Object) -> Object:
    """Raise ValueError for arguments of `apply_chat_template`, such as another template."""
    if taken := sorted(_TEMPLATE_ARGUMENTS & variables.keys()):
        raise ValueError(f"must name variables of the chat template, got {', '.join(taken)}")
    return variables


class TemplatedRequest(Request):
    """A request that is rendered with the chat template."""

    chat_template_kwargs: Annotated[Object, AfterValidator(_variables_only)] | None = Field(
        None, description="vLLM and transformers: variables of the chat template."
    )
    parallel_tool_calls: bool | None = Field(None, description="false: at most one call.")
    continue_final_message: bool | None = Field(
        None, description="vLLM and transformers: the output continues the last message, an assistant message."
    )
    add_generation_prompt: bool | None = Field(
        None, description="vLLM and transformers: false ends the prompt with the last message."
    )


class ChatRequest(ChoicesRequest, TemplatedRequest):
    """`POST /v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1, description="Text content only.")
    max_completion_tokens: TokenLimit | None = Field(None, description="Same as `max_tokens`; takes precedence.")
    logprobs: bool | None = Field(
        None, description="Of the model itself, before penalties, temperature and truncation."
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Most probable tokens per position, with `logprobs`."
    )
    prediction: Prediction | None = Field(None, description="Expected output, drafted first; the model never reads it.")
    tools: Tools | None = Field(
        None, description="Functions, shown by the chat template or in the system message; other types are skipped."
    )
    tool_choice: ToolChoice | None = Field(
        None, description="`auto`, `none`, `required`, a function, or `allowed_tools`."
    )
    reasoning_effort: NonemptyText | None = Field(None, description="For chat templates that read it.")

    unsupported: ClassVar[Unsupported] = {
        **REFUSED,
        "echo": ("it is for /v1/completions", (False,)),
        "add_special_tokens": ("the chat template adds them", (False,)),
        "functions": ("use tools", ([],)),
        "function_call": ("use tool_choice", ("auto", "none")),
        "modalities": ("outputs are text", (["text"],)),
        "audio": ("outputs are text", ()),
    }

    @model_validator(mode="after")
    def _coherent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs=true")
        if self.messages[-1].prefix and self.continue_final_message is None:
            self.continue_final_message = True
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("add_generation_prompt", "must be false with continue_final_message")
        if self.continue_final_message and (role := self.messages[-1].role) != "assistant":
            raise invalid("continue_final_message", f"needs a last message with role 'assistant', got {role[:40]!r}")
        if self.continue_final_message and self.messages[-1].tool_calls:
            raise invalid("continue_final_message", "needs a last message without tool_calls: they follow its text")
        return self

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def tool_mode(self) -> str:
        """Whether functions are called: `auto`, `none`, `required` or `named` (one call of a given function)."""
        return "auto" if self.tool_choice is None else self.tool_choice.mode

    @cached_property
    def shown_tools(self) -> list[Object] | None:
        """The functions shown to the model, in the form of chat templates; None if there are none."""
        mode, names = self.tool_mode, None if self.tool_choice is None else self.tool_choice.names
        tools = self.tools or []
        if names is not None and (unknown := {*names} - {tool.function.name for tool in tools}):
            raise invalid("tool_choice", f"must name functions in tools, got {', '.join(sorted(unknown))[:80]!r}")
        chosen = [tool.shown() for tool in tools if names is None or tool.function.name in names]
        if mode == "required" and not chosen:
            raise invalid("tool_choice", "needs a function in tools, got none")
        return None if mode == "none" else chosen or None

    @property
    def constrained_by(self) -> str | None:
        """The field that constrains tool calls; None if calls are unconstrained."""
        if self.shown_tools is None:
            return None
        if self.tool_mode in ("required", "named"):
            return "tool_choice"
        if any(tool["function"].get("strict") for tool in self.shown_tools):
            return "tools"
        return "parallel_tool_calls" if self.parallel_tool_calls is False else None


def chat_of(request: TemplatedRequest, format_field: str, **fields: Any) -> ChatRequest:
    """Return a chat request with the shared fields of `request`, and `fields`. `format_field` is the request's own name
    of `response_format`.
    """
    stated = TemplatedRequest.model_fields.keys() & request.model_fields_set
    shared = {name: getattr(request, name) for name in stated}
    chat = shared | {name: value for name, value in fields.items() if value is not None}
    try:
        made = ChatRequest.model_validate(chat)
    except ValidationError as error:
        raise refusal(error.errors(), chat) from None
    if "response_format" in fields:
        made._format_field = format_field
    return made
