"""One request, from its arrival to its last token.

Each of its sequences is generated in a worker thread: torch is seeded and the model's own `generate` is called,
accelerated by the drafter that the isolation allows, alone or batched with the sequences of other threads. A request
ends as soon as its client disconnects or its timeout expires.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..cuda_graphs import Way, ordinary
from ..drafters._base import PREDICTED, Drafter
from ..hf.acceleration import Acceleration, view
from ..hf.batched import DecodingThread
from ..loop.hints import NO_HINTS, Hints
from ..loop.stats import Stats
from ..model.self_test import ready
from .errors import ApiError, CancelledError, client_error, config_error
from .logprobs import LogprobRecorder, Scored, scored_prompt
from .stopping import with_own_stopping

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger("token_recycling.serving")


@dataclass
class Text:
    """One sequence to generate."""

    arguments: dict[str, Any]
    """Arguments of `generate`."""
    seed: int | None = None
    recorder: LogprobRecorder | None = None
    """One of its logits processors, where log-probabilities are requested."""
    scored_prompt: int | None = None
    """Number of most likely tokens to score for every prompt token; None: the prompt is not scored."""
    hints: Hints = NO_HINTS
    """Prefix cache, prediction and limits of drafting."""
    first: bool = True
    """Whether it is the first choice of its prompt: cached prompt tokens count once."""


@dataclass
class Job:
    """An accepted request. Everything but `cancel` and `generate_text` runs in the thread of the event loop."""

    model: PreTrainedModel
    drafter: AbstractContextManager[Drafter] | None
    """Context manager of the drafter, entered once; None until the job is admitted."""
    key: str = ""
    """Name of its API key; empty without API keys."""
    prefix: str = ""
    """Prefix of its id."""
    timeout: float | None = None
    """Maximum seconds from arrival to the last token."""
    together: DecodingThread | None = None
    """Decodes its sequences in a batch with others; None where one is decoded at a time."""
    way: Way = ordinary
    """Backend of its steps where one sequence is decoded at a time."""
    texts: int = 1
    """Number of sequences, all with one drafter."""
    watched: Callable[[Drafter], Drafter] = lambda drafter: drafter
    """Wraps the drafter to observe its steps."""
    on_end: Callable[[Job], None] = lambda job: None
    """Called once, after the last token or a cancellation."""
    alone: bool = False
    """Isolated: it shares no drafter and no cache with other requests."""
    warm_up: bool = False
    """The server's own request at start: its prompt may be longer than clients' may."""

    stats: Stats = field(default_factory=Stats, init=False)
    fallback: str | None = field(default=None, init=False)
    """Reason for the fallback to transformers' own decoding, or None."""
    waited: float = field(default=0.0, init=False)
    """Seconds in the queue."""
    first_token_seconds: float | None = field(default=None, init=False)
    """From its arrival to the first generated token of any of its sequences."""
    started: bool = field(default=False, init=False)
    prompt_tokens: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)
    """Prompt tokens found in the prefix cache."""
    predicted_tokens: int = field(default=0, init=False)
    """Tokens of its predictions, one prediction per sequence."""
    cancelled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self._since = time.monotonic()
        self._ended, self._failed, self._changing = False, False, threading.Lock()
        self._generating = self._begun = 0
        """Sequences in progress, and all that were started."""
        self._acquired: Drafter
        """Acquired with the first sequence, released with the last."""
        self._holding = ExitStack()
        self._interrupted: ApiError | None = None

    def cancel(self) -> None:
        """Cancel after a disconnect: a running generation ends with its step, a queued one never starts."""
        if not (self._ended or self._failed):
            self.cancelled = True
        if not self.started:
            self.end()

    def interrupt(self, error: ApiError) -> None:
        """End the generation with an error that the client receives."""
        self._interrupted = error

    def end(self) -> None:
        """Call `on_end`, the first time only."""
        with self._changing:
            first, self._ended = not self._ended, True
        if first:
            self.on_end(self)

    @property
    def seconds(self) -> float:
        """Seconds since arrival."""
        return time.monotonic() - self._since

    @property
    def outcome(self) -> str | None:
        """complete, cancelled or failed; None if it was refused before generation started."""
        if self.cancelled:
            return "cancelled"
        if not self.started:
            return None
        return "failed" if self._failed else "complete"

    def usage(self, tokens: int) -> dict[str, Any]:
        """Return the usage block of a response with that many output tokens, drafting statistics included."""
        stats, said = self.stats, int(self.stats.drafter_statistics[PREDICTED])
        speculation = {
            "drafter": stats.drafter,
            "accelerated": self.fallback is None,
            "steps": stats.steps,
            "mat": round(stats.mat, 4),
            "drafted_tokens": stats.drafted,
            "accepted_tokens": stats.accepted.total(),
            "tokens_per_second": round(stats.tokens_per_second, 2),
            "wait_seconds": round(self.waited, 6),
            "prefill_seconds": round(stats.prefill_seconds, 6),
            "decode_seconds": round(stats.decode_seconds, 6),
            **({} if self.fallback is None else {"not_accelerated_because": self.fallback}),
        }
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": said,
                "rejected_prediction_tokens": self.predicted_tokens - said,
            },
            "speculation": speculation,
        }

    def check(self) -> None:
        """Raise CancelledError, also where another sequence failed, or ApiError after the timeout or at shutdown."""
        if self.cancelled or self._failed or self._ended:
            raise CancelledError
        if self._interrupted is not None:
            raise self._interrupted
        if self.timeout is None or self.seconds < self.timeout:
            return
        if not self.started:
            raise ApiError(
                503,
                f"the request was queued for {self.timeout:g} s, its timeout; try again later",
                "timeout",
                headers={"Retry-After": "5"},
            )
        # Clients retry after a 504 unless a header forbids it.
        headers = {"x-should-retry": "false"}
        raise ApiError(
            504, f"the output was not complete within {self.timeout:g} s, the timeout", "timeout", headers=headers
        )

    def generate_text(self, text: Text, tell: Callable[[list[Scored]], None]) -> None:
        """Generate a sequence in a worker thread; call `tell` with the tokens of each step, with none at its end."""
        with self._turn() as drafter:
            if text.scored_prompt is not None:
                tell(scored_prompt(self.model, text.arguments["input_ids"], text.scored_prompt))
            self._generate(drafter, text, tell)
            tell([])

    @contextmanager
    def _turn(self) -> Iterator[Drafter]:
        """Hold the drafter while a sequence is generated; the job ends with its last sequence. A failure is logged, and
        raised as an ApiError without details.
        """
        try:
            self.check()
            with self._changing:
                if not self.started:
                    self.started, self.waited = True, self.seconds
                    assert self.drafter is not None
                    self._acquired = self._holding.enter_context(self.drafter)
                self._begun, self._generating = self._begun + 1, self._generating + 1
            try:
                yield self.watched(self._acquired)
            finally:
                with self._changing:
                    self._generating -= 1
        except CancelledError:
            raise
        except Exception as error:
            self._failed = True
            raise client_error(error, f"generation {self.id}") from error
        finally:
            with self._changing:
                over = not self._generating and (self._begun == self.texts or self._failed or self.cancelled)
                if over:
                    self._holding.close()
            if over:
                self.end()

    def _generate(self, drafter: Drafter, text: Text, tell: Callable[[list[Scored]], None]) -> None:
        # No client may predict the samples of another.
        seed = secrets.randbits(63) if text.seed is None else text.seed

        def told(tokens: list[Scored]) -> None:
            if self.first_token_seconds is None:
                self.first_token_seconds = self.seconds
            tell(tokens)

        arguments = {**with_own_stopping(text.arguments), "streamer": TokenStreamer(text, told, self.check)}
        if self.together is None:
            torch.manual_seed(seed)
            model = view(self.model, Acceleration(drafter, self.way, ready(self.model), hints=text.hints))
        else:
            model = self.together.model(drafter, seed, text.hints)
        acceleration = model.acceleration
        try:
            model.generate(**arguments)
        except (ValueError, TypeError) as error:
            # Before the first forward pass, transformers checks the generation configuration of the request.
            raise error if acceleration.reached else config_error(error) from error
        finally:
            with self._changing:
                self.stats += acceleration.stats
                self.cached_tokens += acceleration.stats.cached_tokens if text.first else 0
                self.fallback = acceleration.fallback


class TokenStreamer:
    """A streamer of `generate` that passes on the tokens of every step, scored where the sequence has a recorder.
    `check` is called with every step and every chunk of a prompt, and raises to end the sequence.
    """

    def __init__(self, text: Text, tell: Callable[[list[Scored]], None], check: Callable[[], None]) -> None:
        self._text, self._tell, self.reading_prompt = text, tell, check
        self._position: int | None = None

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate`: with the prompt first, then with the tokens of each step."""
        self.reading_prompt()
        if self._position is None:
            self._position = value.shape[-1]
            return
        tokens, recorder, start = value.flatten().tolist(), self._text.recorder, self._position
        self._position += len(tokens)
        if recorder is None:
            self._tell([Scored(token) for token in tokens])
        else:
            self._tell([recorder.scored(start + place, token) for place, token in enumerate(tokens)])

    def end(self) -> None:
        """Called after the last step; there is nothing to do."""
