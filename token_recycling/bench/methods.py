"""Decoding methods: any drafter in our loop, and transformers' own decoding.

A method is written like a drafter (`recycling:tree=16`), so new drafters are methods without any code here. The methods
of transformers are `generate`, `prompt_lookup_hf:n=10` and `assisted:model=FOLDER`. Two prefixes change a method:
`cold:` resets it after every prompt, and `forced:` makes it decode the tokens of `generate`, so that both have the same
output in 16 bits too.

`oracle:model=FOLDER` is the oracle of SpecDec++ (Huang et al., 2405.19715, lemma 2.1): a draft model that has the
target's output in hindsight, and stops drafting before the first token that would be rejected. Nothing is discarded,
and the target makes the fewest possible forward passes. The oracle is an upper bound that exists only in benchmarks.

All methods are timed alike: whole calls, with the device synchronized at both ends. The prefill is the time to the end
of the first forward pass, which emits the first tokens; our loop reports it. So steps count all forward passes, and
decoding time excludes the first one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import MaxLengthCriteria

from .._util.device import synchronize
from .._util.options import check_known, written_options
from .._util.text_stream import StepRecorder
from ..drafters._base import Drafter
from ..drafters._registry import drafter_names, make_drafter, own_names
from ..drafters._shared.draft_models import ModelDrafter
from ..drafters._shared.graph import Rules
from ..drafters._shared.pairing import DraftModelOption
from ..hf.accelerate import accelerated
from ..loop.batch import decode
from ..loop.request import NO_HINTS, Hints, Request, TokenSelector, TokenSequence
from ..loop.stats import Stats
from ..model.backend import Fast
from ..model.info import UnsupportedModelError
from ..model.loading import resolved, title
from ..model.prefixes import own_prefixes
from ..model.support import ready
from ..model.target import Target
from ..trees.draft import Context
from .data import BASELINE, COLD, FORCED, HINDSIGHT, REPLAY_BASELINE

DEFAULT = (BASELINE, "prompt_lookup_hf:n=10", REPLAY_BASELINE, "published", "recycling")
"""Default methods; `published` is Token Recycling as in the paper."""


@dataclass(frozen=True)
class Call:
    """One call to decode."""

    arguments: dict[str, Any]
    """Arguments of `model.generate`: a prompt or a padded batch of them."""
    reference: torch.Tensor | None = None
    """(length,) tokens to decode by teacher forcing; None: the model selects tokens."""
    hints: Hints = NO_HINTS

    @property
    def prompts(self) -> list[torch.Tensor]:
        """Ids (length,) of each prompt, without padding."""
        ids, mask = self.arguments["input_ids"], self.arguments.get("attention_mask")
        return list(ids) if mask is None else [row[read.bool()] for row, read in zip(ids, mask, strict=True)]


@dataclass(frozen=True)
class Outcome:
    """Outcome of one call, for one sequence or a batch."""

    prompts: list[torch.Tensor]
    """Ids (length,) of each prompt."""
    tokens: list[list[int]]
    """Output tokens of each sequence."""
    lengths: list[int] | None
    """Number of tokens of every step, in order; None for a batch."""
    steps: int
    """Forward passes that emitted tokens, counted per sequence."""
    prefill_seconds: float
    seconds: float
    """Decoding time after the first forward pass."""
    total_seconds: float
    """Time of the whole call."""
    processor_seconds: float
    """Processor time of the whole call over all threads of this process; other processes hardly affect it."""
    stats: Stats | None = None
    """Statistics of our own loop; None for transformers' decoding."""

    @property
    def first_tokens(self) -> int:
        """Tokens of the first forward pass: one per sequence, or more if it verified a draft."""
        if self.stats is not None:
            return self.stats.first_tokens
        return sum(map(bool, self.tokens)) if self.lengths is None else sum(self.lengths[:1])

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first forward pass / seconds of decoding; 0 if there are none."""
        tokens = sum(map(len, self.tokens)) - self.first_tokens
        return tokens / self.seconds if tokens > 0 else 0.0


class Stopwatch:
    """Measures elapsed and processor time since its creation; a reading waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._now()

    def read(self) -> tuple[float, float]:
        """Return elapsed seconds and processor seconds."""
        seconds, processor = self._now()
        return seconds - self._began[0], processor - self._began[1]

    def _now(self) -> tuple[float, float]:
        synchronize(self._device)
        return time.perf_counter(), time.process_time()


class Method:
    """A decoding method; it keeps learned state from call to call until it is reset."""

    spec: str
    """The spec as written by the user."""
    label: str
    """Display name."""
    cold = False
    """Whether the method is reset after every prompt."""
    forced = False
    """Whether the method decodes the tokens of `generate` instead of its own."""
    batches = False
    """Whether the method can decode batches of sequences."""
    remembers = False
    """Whether drafts may depend on earlier prompts."""
    draft_model = ""
    """Folder or hub name of the draft model, if the method needs one."""

    @property
    def replayed(self) -> str | None:
        """Spec of the method that replays reference text as this method would, or None."""
        return self.spec

    def reset(self) -> None:
        """Discard all learned state."""

    def hints(self, model: PreTrainedModel, prediction: torch.Tensor | None, turns: int) -> Hints:
        """Return hints for a conversation of `turns` turns, with an optional predicted answer (n,)."""
        return NO_HINTS

    def decode(self, model: PreTrainedModel, call: Call) -> Outcome:
        """Decode a call on a model."""
        raise NotImplementedError


class Drafted(Method):
    """A drafter in our loop."""

    batches = True

    def __init__(self, spec: str, fast: Fast = "auto", **options: Any) -> None:
        """Create the drafter; `fast`: see `accelerate`; `options`: further options of the drafter. Raises ValueError or
        TypeError like `make_drafter`.
        """
        self.spec, self._fast, self._make = spec, fast, lambda: make_drafter(spec, **options)
        name, _, written = spec.partition(":")
        self.label = "plain decoding in this loop" if spec == REPLAY_BASELINE else name.replace("_", " ")
        if written:
            self.label += f" ({written.replace(',', ', ')})"
        self.remembers = spec != REPLAY_BASELINE
        self.drafter: Drafter = self._make()

    def reset(self) -> None:
        self.drafter = self._make()

    def hints(self, model: PreTrainedModel, prediction: torch.Tensor | None, turns: int) -> Hints:
        """Return the prediction, if the drafter supports one, and a prefix cache for later turns."""
        prefixes = own_prefixes(ready(model)) if turns > 1 else None
        return Hints(prefixes=prefixes, prediction=prediction if self.drafter.traits.predictions else None)

    def decode(self, model: PreTrainedModel, call: Call) -> Outcome:
        if call.reference is not None:
            return replay(model, self.drafter, call)
        recorder = None if len(call.arguments["input_ids"]) > 1 else StepRecorder()
        with accelerated(model, self.drafter, fast=self._fast) as acceleration:
            acceleration.stats.synchronize, acceleration.hints = True, call.hints
            tokens, seconds, processor = _generated(model, {**call.arguments, "streamer": recorder})
            stats = acceleration.stats
            if acceleration.fallback is not None:
                raise UnsupportedModelError(f"left to transformers: {acceleration.fallback}")
        lengths = None if recorder is None else [len(step) for step in recorder.steps]
        return _outcome(call, tokens, lengths, stats, seconds, processor)


class Transformers(Method):
    """transformers' own decoding with further arguments of `generate`; it keeps no state between prompts."""

    def __init__(
        self, spec: str, label: str, replayed: str | None = None, batches: bool = False, **arguments: Any
    ) -> None:
        """`replayed`: spec of a drafter with the same drafts."""
        self.spec, self.label, self._replayed, self.batches = spec, label, replayed, batches
        self._arguments = arguments

    @property
    def replayed(self) -> str | None:
        return self._replayed

    def decode(self, model: PreTrainedModel, call: Call) -> Outcome:
        if call.reference is not None:
            raise ValueError(f"{self.spec} selects tokens itself and cannot replay reference text")
        # A step of plain decoding emits one token per sequence; other methods report their steps to a streamer.
        recorder = StepRecorder() if self._arguments else None
        prefill: list[float] = []

        def after_pass(*_: Any) -> None:
            hook.remove()
            prefill.append(watch.read()[0])

        hook = model.register_forward_hook(after_pass)
        try:
            watch = Stopwatch(model.device)
            tokens, seconds, processor = _generated(model, {**call.arguments, **self._arguments, "streamer": recorder})
        finally:
            hook.remove()
        lengths = [1] * len(tokens[0]) if recorder is None else [len(step) for step in recorder.steps]
        return Outcome(
            prompts=call.prompts,
            tokens=tokens,
            lengths=lengths if len(tokens) == 1 else None,
            steps=sum(map(len, tokens)) if recorder is None else len(lengths),
            prefill_seconds=prefill[0],
            seconds=seconds - prefill[0],
            total_seconds=seconds,
            processor_seconds=processor,
        )


class Assisted(Transformers):
    """transformers' assisted generation with a draft model."""

    def __init__(self, spec: str, draft_model: str, tokens: int | None) -> None:
        super().__init__(spec, f"transformers assisted by {Path(title(draft_model)).name}")
        self.draft_model, self._tokens = draft_model, tokens

    def decode(self, model: PreTrainedModel, call: Call) -> Outcome:
        assistant = _assistant(self.draft_model, model.dtype, model.device)
        if self._tokens is not None:
            assistant.generation_config.num_assistant_tokens = self._tokens
        self._arguments = {"assistant_model": assistant}
        return super().decode(model, call)


@lru_cache(maxsize=2)
def _assistant(folder: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    try:
        assistant = AutoModelForCausalLM.from_pretrained(resolved(folder), dtype=dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"there is no causal language model at {folder}: {error}") from error
    return assistant.to(device).eval()


class Oracle(Drafted):
    """A draft model with the optimal draft length in hindsight. The output is first decoded once, untimed."""

    remembers, batches = False, False

    def __init__(self, spec: str, draft_model: str) -> None:
        self.spec, self.label, self.draft_model = spec, f"oracle with {Path(title(draft_model)).name}", draft_model
        self._fast, self._make = "auto", lambda: Hindsight(draft_model)
        self.drafter = self._make()

    def decode(self, model: PreTrainedModel, call: Call) -> Outcome:
        if call.arguments.get("do_sample"):
            raise ValueError("the oracle needs greedy decoding, got sampling: sampled tokens are not known in advance")
        (prompt,) = call.prompts
        known = model.generate(**call.arguments)[0] if call.reference is None else torch.cat([prompt, call.reference])
        assert isinstance(self.drafter, Hindsight)
        self.drafter.knows(known)
        return super().decode(model, call)


@dataclass
class Hindsight(DraftModelOption, ModelDrafter):
    """Drafts the draft model's tokens as long as they equal the known output."""

    name = HINDSIGHT

    def knows(self, text: torch.Tensor) -> None:
        """Set the known next sequence (length,), prompt included."""
        self._text = text

    def rules_for(self, target: Target, model: Target, prompt: torch.Tensor) -> Rules:
        text = self._text.to(prompt.device)
        assert torch.equal(text[: len(prompt)], prompt)
        choices = _choices(model, text, target.vocab_size)
        self._agreeing = _run_lengths(choices == text[1 : len(choices) + 1])
        longest = max([1, *self._agreeing])
        return Rules(longest, 1, longest)

    def depth_for(self, context: Context, rules: Rules) -> int:
        position = len(context.tokens) - 1
        return self._agreeing[position] if position < len(self._agreeing) else 0

    def draft_description(self, rules: Rules) -> str:
        return "as many tokens as will be accepted"


@torch.no_grad()
def _choices(model: Target, text: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the model's argmax after every token of `text` (length,) except the last, up to its maximum length."""
    text = text.clamp(max=model.embedded - 1)[: model.max_length]
    if len(text) < 2:
        return text[:0]
    logits = model.model(input_ids=text[None, :-1].to(model.device), use_cache=False).logits[0, :, :vocabulary]
    return logits.argmax(dim=-1).to(text.device)


def _run_lengths(agreed: torch.Tensor) -> list[int]:
    """Return, for every position, the number of consecutive true values that start there."""
    runs, length = [], 0
    for same in reversed(agreed.tolist()):
        length = length + 1 if same else 0
        runs.append(length)
    return runs[::-1]


class ReplaySelector(TokenSelector):
    """Selects the reference text token by token. The model's own selection also runs, so that the cost is the same."""

    def __init__(self, sequence: TokenSequence, reference: torch.Tensor, processors: LogitsProcessorList) -> None:
        """`reference` (length,): the tokens after the prompt."""
        super().__init__(sequence, processors, sample=False)  # drafts follow the grammar of a processor
        self._own = TokenSelector(sequence, processors, sample=False)
        self._start, self._reference = sequence.length, reference.tolist()
        self.greedy = self.at_every_node = False  # so that this object selects every token, on accelerators too

    def __call__(self, logits: torch.Tensor) -> int:
        self._own(logits)
        return self._reference[self.sequence.length - self._start]


def replay(model: PreTrainedModel, drafter: Drafter, call: Call) -> Outcome:
    """Decode the reference of a call after its prompt; raises UnsupportedModelError like `accelerate`.

    Drafting, verification and learning run as usual, as for a streamed call with the call's prefixes; only the token
    selected at each node of the accepted path is the reference's next token.
    """
    assert call.reference is not None
    (prompt,), reference = call.prompts, call.reference
    stats, lengths, watch = Stats(synchronize=True), [], Stopwatch(model.device)
    target = ready(model)
    sequence = TokenSequence(
        prompt.to(target.device), StoppingCriteriaList([MaxLengthCriteria(len(prompt) + len(reference))])
    )
    processors = LogitsProcessorList(call.arguments.get("logits_processor") or [])
    selector = ReplaySelector(sequence, reference, processors)
    hints = replace(call.hints, prefixes=None) if drafter.traits.isolates_requests else call.hints
    request = Request(target, sequence, selector, drafter, stats, hints=hints, streamed=True)
    for (step,) in decode([request], target.new_cache()):
        lengths.append(len(step.tokens))
    seconds, processor = watch.read()
    tokens = sequence.tokens[len(prompt) :].tolist()
    assert tokens == reference.tolist()
    return _outcome(call, [tokens], lengths, stats, seconds, processor)


def _outcome(
    call: Call, tokens: list[list[int]], lengths: list[int] | None, stats: Stats, seconds: float, processor: float
) -> Outcome:
    """Return the outcome of a call decoded in our loop."""
    return Outcome(
        prompts=call.prompts,
        tokens=tokens,
        lengths=lengths,
        steps=stats.steps,
        prefill_seconds=stats.prefill_seconds,
        seconds=stats.decode_seconds,
        total_seconds=seconds,
        processor_seconds=processor,
        stats=stats,
    )


def _generated(model: PreTrainedModel, arguments: dict[str, Any]) -> tuple[list[list[int]], float, float]:
    """Return the new tokens of every sequence (end of sequence included), elapsed and processor seconds."""
    watch = Stopwatch(model.device)
    sequences = model.generate(**arguments)
    seconds, processor = watch.read()
    eos = model.generation_config.eos_token_id
    ends = set(eos if isinstance(eos, list) else [eos])
    rows = []
    for row in sequences[:, arguments["input_ids"].shape[1] :].tolist():
        end = next((position for position, token in enumerate(row) if token in ends), len(row))
        rows.append(row[: end + 1])
    return rows, seconds, processor


def parse(spec: str) -> Method:
    """Return a new method without learned state for a user's spec; raises ValueError or TypeError."""
    if spec.startswith(FORCED):
        method = parse(spec.removeprefix(FORCED))
        if method.replayed != method.spec:
            raise ValueError(f"{FORCED} needs a drafter, which can decode reference text, got {spec!r}")
        method.spec, method.label, method.forced = spec, f"{method.label}, forced", True
        return method
    if spec.startswith(COLD):
        method = parse(spec.removeprefix(COLD))
        method.spec, method.label, method.cold = spec, f"{method.label}, cold", True
        return method
    name, _, text = spec.partition(":")
    if name in _NAMED:
        names, make = _NAMED[name]
        options = written_options(name, text, known=names)
        check_known(name, options, names)
        return make(spec, options)
    # Check drafters of other packages last: listing them reads the metadata of all installed packages.
    if name not in own_names() and name not in drafter_names():
        raise ValueError(f"a method must be one of {', '.join((*_NAMED, *drafter_names()))}, got {name!r}")
    return Drafted(spec)


def _prompt_lookup(spec: str, options: dict[str, str]) -> Method:
    tokens, ngram = _number(spec, options, "n", 10), _number(spec, options, "ngram", 2)
    return Transformers(
        spec,
        f"transformers prompt lookup ({tokens})",
        replayed=f"prompt_lookup:num_tokens={tokens},max_matching_ngram_size={ngram}",
        prompt_lookup_num_tokens=tokens,
        max_matching_ngram_size=ngram,
    )


_NAMED: dict[str, tuple[tuple[str, ...], Callable[[str, dict[str, str]], Method]]] = {
    BASELINE: ((), lambda spec, options: Transformers(BASELINE, "transformers generate", batches=True)),
    "prompt_lookup_hf": (("n", "ngram"), _prompt_lookup),
    "assisted": (
        ("model", "n"),
        lambda spec, options: Assisted(spec, _folder(spec, options), _number(spec, options, "n", None)),
    ),
    HINDSIGHT: (("model",), lambda spec, options: Oracle(spec, _folder(spec, options))),
}
"""Methods that are not drafters: option names, and a function of the spec and the options."""


def _folder(spec: str, options: dict[str, str]) -> str:
    folder = options.pop("model", "")
    if not folder:
        name = spec.partition(":")[0]
        raise ValueError(f"{name} needs a draft model, {name}:model=FOLDER, got {spec!r}")
    return folder


def _number(spec: str, options: dict[str, str], option: str, default: Any) -> Any:
    value = options.pop(option, None)
    if value is None:
        return default
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{option} must be an integer >= 1 in {spec!r}, got {value!r}")
    return int(value)
