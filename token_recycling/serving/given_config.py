"""The extra field `generation_config` of transformers' clients: what of it a request may say, and within which bounds.

transformers checks some of it when a text begins and some in the middle of one, or not at all: numbers that overflow
there, and tokens that are none, are refused here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError
from transformers import GenerationConfig

from .errors import field_and_message, invalid
from .json_values import check_json
from .stopping import Stops

MOST = 1024
"""Entries of a list: tokens whose logits a request changes are some work at every step."""
_Count = Annotated[int, Field(ge=0, lt=2**31)]
_Id = Annotated[int, Field(ge=-1)]
"""-1 stands for none in some models' configurations."""
_Share = Annotated[float, Field(ge=0, le=1)]
_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MOST)]
_Bias = Annotated[float, Field(ge=-1e6, le=1e6)]


class Given(BaseModel, extra="forbid", strict=True):
    """How tokens are chosen, and nothing of what is computed or kept."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: _Count | None = None
    top_p: _Share | None = None
    min_p: _Share | None = None
    top_h: _Share | None = None
    typical_p: _Share | None = None
    epsilon_cutoff: _Share | None = None
    eta_cutoff: _Share | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: _Count | None = None
    max_new_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_new_tokens: _Count | None = None
    bad_words_ids: Annotated[list[_Ids], Field(max_length=MOST)] | None = None
    sequence_bias: Annotated[list[tuple[_Ids, _Bias]], Field(max_length=MOST)] | None = None
    suppress_tokens: _Ids | None = None
    begin_suppress_tokens: _Ids | None = None
    exponential_decay_length_penalty: tuple[_Count, Annotated[float, Field(gt=0, le=100)]] | None = None
    eos_token_id: _Id | _Ids | None = None
    pad_token_id: _Id | None = None
    bos_token_id: _Id | None = None
    stop_strings: Stops | None = None
    renormalize_logits: bool | None = None
    remove_invalid_values: bool | None = None


_IDS = (
    "bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "eos_token_id", "pad_token_id", "bos_token_id",
)  # fmt: skip
FORBIDDING = ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "no_repeat_ngram_size")
"""What forbids tokens: a form that allows no others could not be completed."""


def given_config(text: str | None) -> dict[str, Any]:
    """What the extra field `generation_config`, JSON of a GenerationConfig, sets; raises ApiError."""
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise invalid("generation_config", "expected a JSON object in a string")
    check_json("generation_config", given)
    usual = GenerationConfig().to_dict()
    given = {name: value for name, value in given.items() if value is not None}
    known = Given.model_fields.keys()
    others = sorted(
        name
        for name, value in given.items()
        if name not in known and not name.startswith(("_", "transformers_version")) and value != usual.get(name)
    )
    if others:
        raise invalid("generation_config", f"expected fields of {', '.join(sorted(known))}, got {', '.join(others)}")
    try:
        read = Given.model_validate_json(json.dumps({name: given[name] for name in given.keys() & known}))
    except ValidationError as error:
        field, message = field_and_message(error.errors())
        raise invalid("generation_config", f"{field}: {message}") from None
    return read.model_dump(exclude_none=True)


def check_ids(given: Mapping[str, Any], vocabulary: int) -> None:
    """Raises ApiError for tokens that a request names in its `generation_config` and the model does not have."""
    ids = [token for name in _IDS for token in _flat(given.get(name))]
    ids += [token for sequence, _ in given.get("sequence_bias") or () for token in sequence]
    if max(ids, default=0) >= vocabulary:
        raise invalid("generation_config", f"expected token ids below {vocabulary}, got {max(ids)}")
    forbidden = {*(given.get("suppress_tokens") or ()), *(given.get("begin_suppress_tokens") or ())}
    forbidden.update(sequence[0] for sequence in given.get("bad_words_ids") or () if len(sequence) == 1)
    if len(forbidden) >= vocabulary:
        raise invalid("generation_config", "expected tokens that are left to choose from, got all of them forbidden")


def _flat(ids: Any) -> Iterator[int]:
    if isinstance(ids, int):
        yield ids
    for one in ids if isinstance(ids, list) else ():
        yield from _flat(one)
