"""The loop: draft, verify, keep, learn.

One step runs in one direction. The drafter proposes a tree from the text so far; one forward pass gives the target's
logits after every node; acceptance finds the tokens to emit and trims them at the end of the text; the cache keeps the
accepted slots; the drafter learns; the step is handed out. The last token of the text is never in the cache: it is the
root of the next draft. So the prompt's last token is the first root, every emitted token belongs to a step, and plain
decoding is the same loop with a lone root.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.cache_utils import Cache
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .accept import accept_greedy, accept_walk
from .cache import TreeCache
from .drafting import Context, Drafter, Step, make_drafter
from .stats import Clock, Stats
from .target import Target, UnsupportedModelError, unsupported_cache


class Text:
    """The tokens so far, and what ends them."""

    def __init__(self, prompt: torch.Tensor, criteria: StoppingCriteriaList) -> None:
        """`prompt` (length,) int64; `criteria` as `generate` makes them, a maximum length among them."""
        limits = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
        if not limits:
            raise ValueError("expected a limit on the length of the text; set max_new_tokens")
        self.max_length = min(limits)
        # The two criteria of every run are checked on numbers; all others are asked as they are, once per token.
        eos = [criterion.eos_token_id.tolist() for criterion in criteria if type(criterion) is EosTokenCriteria]
        self._eos = frozenset(token for tokens in eos for token in tokens)
        self._others = [
            criterion for criterion in criteria if type(criterion) not in (MaxLengthCriteria, EosTokenCriteria)
        ]
        self._buffer = prompt.new_empty(max(self.max_length, len(prompt) + 1))
        self._buffer[: len(prompt)] = prompt
        # Writing a number through numpy costs a fiftieth of writing it through torch.
        self._cells = self._buffer.numpy() if prompt.device.type == "cpu" else self._buffer
        self.length = len(prompt)
        self.scores: list[torch.Tensor] | None = None
        """Processed scores (1, vocabulary) per emitted token, if they are kept; some criteria read them."""

    @property
    def tokens(self) -> torch.Tensor:
        """(length,) int64, a view."""
        return self._buffer[: self.length]

    @property
    def room(self) -> int:
        """How many more tokens fit; at least one, as in `generate`."""
        return max(1, self.max_length - self.length)

    def append(self, token: int) -> bool:
        """Puts a token at the end; True if the text ends with it."""
        self._cells[self.length] = token
        self.length += 1
        ended = token in self._eos or self.length >= self.max_length
        scores = None if self.scores is None else tuple(self.scores)
        for criterion in self._others:
            ended |= bool(torch.as_tensor(criterion(self.tokens[None], scores)).all())
        return ended


class Chooser:
    """The target's choice at a node, as `generate` makes it: processors on the path of that node, then argmax or one
    draw.
    """

    def __init__(
        self,
        text: Text,
        processors: LogitsProcessorList,
        sample: bool,
        keep_scores: bool = False,
        keep_logits: bool = False,
    ) -> None:
        self.text, self.processors, self.sample = text, processors, sample
        self.logits: list[torch.Tensor] | None = [] if keep_logits else None
        text.scores = [] if keep_scores else None
        self.greedy = not (sample or len(processors) or keep_scores or keep_logits)
        """True if the choice is the argmax of the logits and nothing else is asked for."""

    def __call__(self, logits: torch.Tensor) -> int:
        """The next token after the text so far, from logits (vocabulary,)."""
        if self.greedy:
            fast = logits.device.type == "cpu" and logits.dtype == torch.float32
            return int(logits.numpy().argmax() if fast else logits.argmax())
        raw = logits[None].to(copy=True, dtype=torch.float32, device=self.text.tokens.device)
        scores = self.processors(self.text.tokens[None], raw)
        if self.text.scores is not None:
            self.text.scores.append(scores)
        if self.logits is not None:
            self.logits.append(raw)
        if self.sample:
            return int(torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1))
        return int(scores.argmax(dim=-1))


@torch.no_grad()
def decode(
    target: Target, text: Text, drafter: Drafter, chooser: Chooser, cache: Cache, stats: Stats
) -> Iterator[Step]:
    """Yields one `Step` after another until the text ends.

    `cache` holds a prefix of the text, or nothing, and afterwards all of the text but its last token.
    """
    clock = Clock(stats, target.device)
    drafter.start(text.tokens, target)
    held = cache.get_seq_length()
    if held >= text.length:
        raise ValueError(
            f"expected a cache of fewer than the {text.length} tokens given, got one of {held}; "
            "pass the whole text so far"
        )
    target.prefill(text.tokens, cache, drafter.observe_prompt if drafter.learns_prompt else None)
    stats.prompt_tokens += text.length
    kept = TreeCache(cache)
    stats.drafter = drafter.describe()
    clock.prefilled()
    # Waiting for an accelerator costs more than reading all rows of logits there; on a CPU it is the other way round.
    verify = accept_greedy if chooser.greedy and target.device.type != "cpu" else accept_walk
    finished = False
    while not finished:
        clock.restart()
        length = text.length - 1
        draft = drafter.draft(Context(text.tokens, text.room)).cut(_depth_limit(text, target))
        draft = draft.cut(target.depth_limit(draft.tree, length))
        clock.lap("retrieve")
        target.cross(text.tokens, cache)
        inputs = target.inputs(draft, length)
        clock.lap("prepare")
        logits = target.forward(inputs, cache)
        clock.lap("forward")
        step = verify(draft, logits, text.append, chooser)
        clock.lap("verify")
        kept.keep(length, step.accepted)
        clock.lap("update cache")
        drafter.observe(step)
        stats.count(step)
        clock.lap("update matrix")
        finished = step.finished
        yield step


def _depth_limit(text: Text, target: Target) -> int:
    """How deep a node may stand: within the tokens still asked for, and within the positions that the model was made
    for.
    """
    positions = target.max_length - text.length if target.max_length is not None else text.room
    return max(0, min(text.room - 1, positions))


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
    **options: Any,
) -> Iterator[Step]:
    """Generates step by step, on token ids alone: each `Step` holds the draft, the logits at its nodes and the emitted
    tokens.

    `input_ids` is (length,) or (1, length) int64. `eos_token_id` defaults to the model's; pass [] for none. `options`
    go to the drafter. Pass one made drafter again to keep what it learned. Raises UnsupportedModelError, or ValueError
    for an input that cannot be continued; nothing runs until the first step is asked for, but all arguments are checked
    at once.
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
    return decode(target, text, drafter, chooser, cache, stats if stats is not None else Stats())


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
