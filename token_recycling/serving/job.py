"""One request, from its arrival to its last token.

Each of its texts runs in a thread that generates. There torch is seeded and the model's own `generate` is called,
accelerated by the drafter that the isolation allows: alone, or together with the texts of other threads. It ends as
soon as its client disconnects or its time is over.
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
    """One text to generate."""

    arguments: dict[str, Any]
    """Of `generate`."""
    seed: int | None = None
    recorder: LogprobRecorder | None = None
    """One of its processors, where log-probabilities are wanted."""
    scored_prompt: int | None = None
    """How many likeliest tokens are wanted for every token of the prompt; None: the prompt is not scored."""
    hints: Hints = NO_HINTS
    """What is known of it before it is decoded."""
    first: bool = True
    """Whether it is the first choice of its prompt: what was kept of that counts once."""


@dataclass
class Job:
    """An accepted request. All but `cancel` and `generate_text` is for the thread of the event loop."""

    model: PreTrainedModel
    drafter: AbstractContextManager[Drafter] | None
    """Gives the drafter for the length of a `with` block, once; None until the job is admitted."""
    key: str = ""
    """Name of its API key; empty where none is needed."""
    prefix: str = ""
    """What its id begins with."""
    timeout: float | None = None
    """Seconds from arrival to the last token at most."""
    together: DecodingThread | None = None
    """Decodes its texts together with others; None where one text is generated at a time."""
    way: Way = ordinary
    """How its steps are made where one text is generated at a time."""
    texts: int = 1
    """How many will be generated, all with one drafter."""
    watched: Callable[[Drafter], Drafter] = lambda drafter: drafter
    """Wraps the drafter, so that its steps are seen."""
    on_end: Callable[[Job], None] = lambda job: None
    """Called once, when nothing more will be generated."""
    alone: bool = False
    """It learns from no other request, and none learns from it."""
    warm_up: bool = False
    """The server's own request at start: its prompt may be longer than clients' may."""

    stats: Stats = field(default_factory=Stats, init=False)
    fallback: str | None = field(default=None, init=False)
    """Why transformers' own decoding was used, or None."""
    waited: float = field(default=0.0, init=False)
    """Seconds before its turn came."""
    first_token_seconds: float | None = field(default=None, init=False)
    """From its arrival to the first generated token of any of its sequences."""
    started: bool = field(default=False, init=False)
    prompt_tokens: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)
    """Tokens of its prompts that were kept of earlier texts."""
    predicted_tokens: int = field(default=0, init=False)
    """Tokens of its predictions, one for every text."""
    cancelled: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}{uuid.uuid4().hex}"
        self._since = time.monotonic()
        self._ended, self._failed, self._changing = False, False, threading.Lock()
        self._generating = self._begun = 0
        """Texts that are being generated, and all that have begun."""
        self._acquired: Drafter
        """Held from the first text to the last."""
        self._holding = ExitStack()
        self._interrupted: ApiError | None = None

    def cancel(self) -> None:
        """The client has disconnected: a running generation ends with its step, a waiting one never begins."""
        if not (self._ended or self._failed):
            self.cancelled = True
        if not self.started:
            self.end()

    def interrupt(self, error: ApiError) -> None:
        """The server ends the text, of which the client is told with that error."""
        self._interrupted = error

    def end(self) -> None:
        """Nothing more will be generated: calls `on_end`, the first time only."""
        with self._changing:
            first, self._ended = not self._ended, True
        if first:
            self.on_end(self)

    @property
    def seconds(self) -> float:
        """Seconds since its arrival."""
        return time.monotonic() - self._since

    @property
    def outcome(self) -> str | None:
        """How it ended: complete, cancelled, failed; None if it was refused before its text began."""
        if self.cancelled:
            return "cancelled"
        if not self.started:
            return None
        return "failed" if self._failed else "complete"

    def usage(self, tokens: int) -> dict[str, Any]:
        """The usage block of an answer of that many tokens, with statistics of drafting."""
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
        """Raises CancelledError, also where another text has failed, or ApiError where the time is over or the server
        ends.
        """
        if self.cancelled or self._failed or self._ended:
            raise CancelledError
        if self._interrupted is not None:
            raise self._interrupted
        if self.timeout is None or self.seconds < self.timeout:
            return
        if not self.started:
            raise ApiError(503, f"the request waited for {self.timeout:g} s", "timeout", headers={"Retry-After": "5"})
        # Clients retry after a 504 unless a header forbids it.
        headers = {"x-should-retry": "false"}
        raise ApiError(504, f"the text was not complete within {self.timeout:g} s", "timeout", headers=headers)

    def generate_text(self, text: Text, tell: Callable[[list[Scored]], None]) -> None:
        """Generates a text, in a thread that generates; tells its tokens as they come, and none at its end."""
        with self._turn() as drafter:
            if text.scored_prompt is not None:
                tell(scored_prompt(self.model, text.arguments["input_ids"], text.scored_prompt))
            self._generate(drafter, text, tell)
            tell([])

    @contextmanager
    def _turn(self) -> Iterator[Drafter]:
        """The time in which a text is generated, with the drafter of all of them; with the last one the job ends. What
        fails in it is logged, and raised as an ApiError that does not say how.
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
        # None may predict another's draws.
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
    """A streamer of `generate` that tells the tokens of every step, scored where the text has a recorder. `check` is
    called with every step and every piece of a prompt, and raises where the text is to end.
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
