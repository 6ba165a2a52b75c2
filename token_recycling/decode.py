"""The loop: draft, verify, keep, learn.

One step runs in one direction. The drafter proposes a tree from the text so far; one forward pass gives the target's
logits after every node; acceptance finds the tokens to emit and trims them at the end of the text; the cache keeps the
accepted slots; the drafter learns; the step is handed out. The last token of the text is never in the cache: it is the
root of the next draft. So the prompt's last token is the first root, every emitted token belongs to a step, and plain
decoding is the same loop with a lone root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .drafting import Drafter, Step, make_drafter
from .fast import Fast, chosen
from .passes import Run
from .stats import Clock, Stats
from .target import Target, UnsupportedModelError, unsupported_cache
from .text import Chooser, Text


@torch.no_grad()
def decode(
    target: Target,
    texts: Sequence[Text],
    drafter: Drafter,
    choosers: Sequence[Chooser],
    cache: Cache,
    stats: Stats,
    held: Sequence[int] | None = None,
    judge: Callable[[], None] | None = None,
    fast: Fast = False,
) -> Iterator[list[Step]]:
    """Yields the steps of one forward pass after another, one step for every text that had not ended, until all have.

    `cache` holds nothing or a prefix of each text, from slot 0 on: `held[row]` tokens of it, if they are not equally
    many. Afterwards it holds of each text all but the last token; where texts differ in length, the slots after the
    shorter ones are of no text. `judge` is called after every pass and may end texts. `fast` says which way passes are
    made, as in `accelerate`.
    """
    clock = Clock(stats, target.device)
    with chosen(fast, target, texts, choosers, drafter, cache) as way:
        drafter.start([text.tokens.to(target.device) for text in texts], target)
        _prefill(target, texts, drafter, cache, held or [cache.get_seq_length()] * len(texts))
        passes = way(Run(target, texts, drafter, choosers, cache, clock))
        stats.prompt_tokens += sum(text.length for text in texts)
        stats.drafter, stats.path = drafter.describe(), passes.describe()
        clock.prefilled()
        going = list(range(len(texts)))
        try:
            while going:
                clock.restart()
                steps = passes.step(going)
                for step in steps:
                    passes.learn(step)
                    stats.count(step)
                stats.drafter_statistics.update(drafter.statistics())
                clock.lap("update matrix")
                if judge is not None:
                    judge()
                going = [row for row in going if not texts[row].ended]
                yield steps
        finally:
            passes.close()


def _prefill(target: Target, texts: Sequence[Text], drafter: Drafter, cache: Cache, held: Sequence[int]) -> None:
    """Puts all of each text but its last token into the cache, as far as it is not there."""
    for text, own in zip(texts, held, strict=True):
        if own >= text.length:
            raise ValueError(
                f"expected a cache of fewer than the {text.length} tokens given, got one of {own}; "
                "pass the whole text so far"
            )
    observe = drafter.observe_prompt if drafter.learns_prompt else None
    target.prefill([text.tokens for text in texts], cache, observe, held)


def stream(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    drafter: str | Drafter = "recycling",
    *,
    max_new_tokens: int = 256,
    eos_token_id: int | list[int] | None = None,
    do_sample: bool = False,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    past_key_values: Cache | None = None,
    stats: Stats | None = None,
    fast: Fast = "auto",
    **options: Any,
) -> Iterator[Step]:
    """Generates step by step, on token ids alone: each `Step` holds the draft, the logits at its nodes and the emitted
    tokens.

    `input_ids` is (length,) or (1, length) int64. `eos_token_id` defaults to the model's; pass [] for none. `options`
    go to the drafter; `fast` is as in `accelerate`. Pass one made drafter again to keep what it learned. Raises
    UnsupportedModelError, or ValueError for an input that cannot be continued, at once; what a drafter finds wrong with
    the model comes with the first step.
    """
    target, drafter = Target(model), make_drafter(drafter, **options)
    prompt = checked_prompt(input_ids, target)
    if max_new_tokens < 1:
        raise ValueError(f"expected max_new_tokens of 1 or more, got {max_new_tokens}")
    criteria = StoppingCriteriaList([MaxLengthCriteria(len(prompt) + max_new_tokens), *(stopping_criteria or [])])
    eos = model.generation_config.eos_token_id if eos_token_id is None else eos_token_id
    if eos is not None and eos != []:
        criteria.append(EosTokenCriteria(eos))
    cache = target.new_cache() if past_key_values is None else past_key_values
    reason = unsupported_cache(cache)
    if reason is not None:
        raise UnsupportedModelError(reason)
    text = Text(prompt, criteria)
    chooser = Chooser(text, logits_processor or LogitsProcessorList(), do_sample)
    steps = decode(target, [text], drafter, [chooser], cache, stats if stats is not None else Stats(), fast=fast)
    return (step for (step,) in steps)


def checked_prompt(input_ids: torch.Tensor, target: Target) -> torch.Tensor:
    """The prompt as (length,) int64 on the target's device; raises ValueError with what is wrong."""
    shape = tuple(input_ids.shape)
    if input_ids.ndim == 2 and shape[0] == 1:
        input_ids = input_ids[0]
    if input_ids.ndim != 1 or not len(input_ids) or input_ids.is_floating_point():
        raise ValueError(
            "expected one prompt of token ids, shape (length,) or (1, length), length 1 or more, "
            f"got {shape} {input_ids.dtype}"
        )
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= target.embedded:
        raise ValueError(
            f"expected token ids from 0 to {target.embedded - 1}, "
            f"got {int(input_ids.min())} to {int(input_ids.max())}; is this the model's tokenizer?"
        )
    return input_ids.to(target.device, torch.long)
