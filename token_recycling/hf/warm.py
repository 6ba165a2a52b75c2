"""Warm-up of a drafter: the model generates sequences without a prompt, and the drafter learns from them.

A chat model is given the start of a user's turn and continues it: it writes the kind of prompts it was trained on
(Magpie, 2406.08464), then answers them. Other models begin with their start token. Sequences are generated in batches;
prompts are sampled, answers are greedy. Cost: the requested time, once per model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torch
from transformers import PreTrainedModel

from .._util.chat_templates import readable
from ..drafters._base import Drafter
from ..model.backend import Backend
from ..model.inspection import context_length
from ..model.support import ready
from ..model.target import Target
from ..recycling.matrix_file import fingerprint
from ..recycling.ngram_matrix import NgramMatrix
from ..recycling.suffix_index import SuffixIndex
from .acceleration import Acceleration, view

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_AT_ONCE, _QUESTION, _ANSWER = 32, 48, 160
"""Batch size, if the model decodes batches, and maximum tokens of a prompt and of an answer."""
_PLACE = "\u2063here\u2063"
"""Placeholder for the user's message."""


@runtime_checkable
class Learner(Protocol):
    """A drafter that can be warmed up."""

    def prepare(self, target: Target) -> NgramMatrix:
        """Return the matrix for this target."""

    def warmed_file(self, target: Target) -> Path:
        """Return the file for what was learned from the target's own output."""


class Warmed(NamedTuple):
    """Result of a warm-up."""

    file: Path
    tokens: int
    texts: int
    seconds: float


def warm(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Drafter,
    minutes: float = 1.0,
    *,
    seed: int = 0,
    output: Path | None = None,
    history: bool = False,
    progress: Callable[[int], None] = lambda tokens: None,
) -> Warmed:
    """Let the model generate for `minutes`, at least one batch, teach the drafter, and save the result in the file
    `output`; by default where the option `warmed=true` finds it. `history`: also keep the sequences in the history of
    outputs. KeyboardInterrupt after the first batch ends the generation, and the result is saved. Raises ValueError.
    """
    if not minutes > 0:
        raise ValueError(f"minutes must be > 0, got {minutes}")
    if not isinstance(drafter, Learner):
        raise ValueError(f"drafter {drafter.name} does not learn from the model's output; use recycling")
    began, texts, tokens = time.perf_counter(), 0, 0
    before, after = _frame(tokenizer)
    target = ready(model)
    matrix = drafter.prepare(target)
    batch = _AT_ONCE if target.info.why_not_batch is None else 1
    acceleration = Acceleration(drafter, Backend("auto"), target)
    writer = view(model, acceleration)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            while not texts or time.perf_counter() - began < 60 * minutes:
                written = _written(writer, tokenizer, batch, before, after)
                if acceleration.fallback is not None:
                    raise ValueError(f"nothing was learned, since calls are not accelerated: {acceleration.fallback}")
                texts, tokens = texts + batch, tokens + written
                progress(tokens)
        except KeyboardInterrupt:
            if not tokens:
                raise
    if not tokens:
        raise ValueError(
            "nothing was learned: every output of the model ended with its first token; check the tokenizer's special "
            "tokens and chat template"
        )
    if not history:
        matrix.history = SuffixIndex(capacity=matrix.history.capacity)
    file = drafter.warmed_file(target) if output is None else output
    file.parent.mkdir(parents=True, exist_ok=True)
    matrix.save(file, fingerprint(tokenizer))
    return Warmed(file, tokens, texts, time.perf_counter() - began)


def _frame(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids before and after a user's message; none after it for a model without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
        return [begin if begin is not None else 0], []
    chat = readable(tokenizer, [{"role": "user", "content": _PLACE}])
    text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    before, _, after = text.partition(_PLACE)
    ids = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    return tuple(ids)


def _written(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: int, before: list[int], after: list[int]
) -> int:
    """Generate a batch of sequences with an accelerated model; return their number of tokens."""
    room = context_length(model)
    longest = _ANSWER if room is None else min(_ANSWER, room - len(before) - len(after) - _QUESTION)
    drawn: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 0}
    starts = torch.tensor([before] * batch, device=model.device)
    most = _QUESTION if after else longest
    # With a mask: a sequence may begin with the padding token.
    first = model.generate(starts, attention_mask=torch.ones_like(starts), max_new_tokens=most, **drawn)
    questions = [_without_end(tokenizer, row) for row in first[:, len(before) :].tolist()]
    tokens = sum(map(len, questions))
    if not after:
        return tokens
    prompts = [before + question + after for question in questions]
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(each)) + each for each in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in prompts], device=model.device)
    answers = model.generate(ids, attention_mask=mask, max_new_tokens=longest, do_sample=False)[:, width:]
    return tokens + sum(len(_without_end(tokenizer, row)) for row in answers.tolist())


def _without_end(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> list[int]:
    """Return the tokens before the end of a sequence, and before its padding."""
    ends = (place for place, token in enumerate(ids) if token in tokenizer.all_special_ids)
    return ids[: next(ends, len(ids))]
