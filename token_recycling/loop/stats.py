"""Statistics of a run: mean accepted tokens, time per part of a step, and acceptance by depth and rank.

Counting costs microseconds per step. On an accelerator operations are queued, so times of parts are only accurate if
the device is synchronized: pass `Stats(synchronize=True)` when measuring.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from ..trees.draft import Step

PARTS = ("retrieve", "prepare", "forward", "verify", "update cache", "update matrix")
"""The parts of a step, in order (Token Recycling, figure 4)."""


@dataclass
class Stats:
    """Counts and times of one run, or of several runs added with `+`."""

    synchronize: bool = False
    """Synchronize the device at the end of every part."""
    tokens: int = 0
    """Emitted tokens."""
    steps: int = 0
    """Decoding steps: forward passes that verified a draft or a lone root, possibly along with a prompt."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were cached from earlier sequences and not computed again."""
    prefill_seconds: float = 0.0
    """Seconds until the first tokens, including the pass that reads the prompt and verifies the first draft."""
    first_tokens: int = 0
    """Tokens emitted by passes that also read a prompt."""
    compile_seconds: float = 0.0
    """Seconds spent compiling the drafting loops, once per machine; part of neither prefill nor decoding time."""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Seconds per part of a step."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Number of steps by emitted tokens."""
    nodes: Counter[int] = field(default_factory=Counter)
    """Number of steps by nodes of the tree, the root included."""
    depths: Counter[int] = field(default_factory=Counter)
    """Number of steps by depth of the tree."""
    tried: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Nodes whose parent was accepted, by depth and rank."""
    accepted: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Accepted nodes by depth and rank, roots excluded."""
    drafter: str = ""
    """Description of the drafter."""
    path: str = ""
    """How steps were made, `eager` or `fast`, and why."""
    drafter_statistics: Counter[str] = field(default_factory=Counter)
    """Counts of the drafter, by name; see `Drafter.statistics`."""

    @property
    def mat(self) -> float:
        """Mean accepted tokens per step, the target's own token included: 1.0 for plain decoding."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def decode_seconds(self) -> float:
        """Seconds of all steps, prefill excluded."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second of decoding, excluding the tokens and time of the first forward pass. Every rate
        that this package reports as tokens/s has this definition.
        """
        return (self.tokens - self.first_tokens) / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def drafted(self) -> int:
        """Drafted tokens, roots excluded."""
        return sum((nodes - 1) * steps for nodes, steps in self.nodes.items())

    @property
    def discarded(self) -> int:
        """Drafted tokens that were not accepted."""
        return self.drafted - self.accepted.total()

    @property
    def discard_rate(self) -> float:
        """Rejected drafted tokens per emitted token (SpecDec++, 2405.19715, equation 2.3)."""
        return self.discarded / self.tokens if self.tokens else 0.0

    @property
    def verification_rate(self) -> float:
        """Forward passes of the target per emitted token: 1.0 for plain decoding, the inverse of MAT."""
        return self.steps / self.tokens if self.tokens else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafted tokens as a share of the depth of the drafts, the most that a step can accept."""
        depth = sum(depth * steps for depth, steps in self.depths.items())
        return self.accepted.total() / depth if depth else 0.0

    @property
    def plain_steps(self) -> float:
        """Share of the steps without a draft; near 1 where speculation does not pay."""
        return self.nodes[1] / self.steps if self.steps else 0.0

    @property
    def overhead(self) -> float:
        """Time of a step outside the forward pass, relative to the forward pass."""
        forward = self.seconds["forward"]
        return (self.decode_seconds - forward) / forward if forward else 0.0

    @property
    def acceptance_by_depth(self) -> dict[int, float]:
        """Share of the steps with a tree at least that deep in which a node of that depth was accepted."""
        accepted = _summed(self.accepted, 0)
        steps = {
            depth: sum(n for d, n in self.depths.items() if d >= depth)
            for depth in range(1, max(self.depths, default=0) + 1)
        }
        return {depth: accepted[depth] / n for depth, n in steps.items()}

    @property
    def acceptance_by_rank(self) -> dict[int, float]:
        """Share of the nodes of that rank that were accepted, given an accepted parent."""
        tried, accepted = _summed(self.tried, 1), _summed(self.accepted, 1)
        return {rank: accepted[rank] / tried[rank] for rank in sorted(tried)}

    def count(self, step: Step, first: bool = False) -> None:
        """Count one step; `first`: its pass also read the prompt."""
        self.steps += 1
        self.first_tokens += len(step.tokens) if first else 0
        self.tokens += len(step.tokens)
        self.lengths[len(step.tokens)] += 1
        draft = step.draft
        self.nodes[len(draft)] += 1
        self.depths[draft.depth] += 1
        children = draft.children
        for depth, (node, following) in enumerate(zip(step.accepted, [*step.accepted[1:], None], strict=True), start=1):
            for rank, child in enumerate(children[node]):
                self.tried[depth, rank] += 1
                if child == following:
                    self.accepted[depth, rank] += 1

    def __add__(self, other: Stats) -> Stats:
        merged: dict[str, Any] = {
            "synchronize": self.synchronize or other.synchronize,
            "drafter": other.drafter or self.drafter,
            "path": other.path or self.path,
            "seconds": {part: self.seconds[part] + other.seconds[part] for part in PARTS},
        }
        names = {field.name for field in fields(self)} - merged.keys()
        return Stats(**merged, **{name: getattr(self, name) + getattr(other, name) for name in names})

    def _repr_html_(self) -> str:
        """Render the figures and charts of tokens and time in a notebook."""
        from .._util import display

        if not self.steps:
            return display.figures("nothing decoded yet", [self.drafter], {})._repr_html_()
        rate = f"{self.tokens_per_second:,.0f} tokens/s of decoding, " if self.decode_seconds else ""
        lines = [
            f"{self.tokens:,} tokens in {self.steps:,} steps; {rate}{1000 * self.prefill_seconds:.0f} ms to the first",
            f"{self.drafted:,} tokens drafted, {self.accepted.total():,} of them accepted",
            self.drafter,
            self.path,
        ]
        bars: dict[str, dict[str, float]] = {
            "steps by emitted tokens": {
                **{str(length): self.lengths[length] for length in range(1, min(max(self.lengths), 8) + 1)},
                **({"more": more} if (more := sum(n for length, n in self.lengths.items() if length > 8)) else {}),
            },
            "accepted by depth, %": {str(d): 100 * share for d, share in self.acceptance_by_depth.items() if d <= 8},
            "ms a step": {part: 1000 * seconds / self.steps for part, seconds in self.seconds.items() if seconds},
        }
        return display.figures(f"{self.mat:.2f} tokens a step", lines, bars)._repr_html_()

    def as_dict(self) -> dict[str, Any]:
        """Return all counts and derived figures as plain numbers for JSON."""
        names = (
            "drafter path synchronize prompt_tokens cached_tokens tokens steps mat tokens_per_second discard_rate "
            "verification_rate plain_steps prefill_seconds first_tokens compile_seconds decode_seconds "
            "acceptance_by_depth acceptance_by_rank acceptance_rate"
        )
        return {
            **{name: getattr(self, name) for name in names.split()},
            "drafted_tokens": self.drafted,
            "discarded_tokens": self.discarded,
            "seconds": dict(self.seconds),
            "overhead_share_of_forward": self.overhead,
            "steps_by_length": dict(sorted(self.lengths.items())),
            "steps_by_nodes": dict(sorted(self.nodes.items())),
            "steps_by_depth": dict(sorted(self.depths.items())),
            "tried_by_depth_and_rank": _nested(self.tried),
            "accepted_by_depth_and_rank": _nested(self.accepted),
            "drafter_statistics": dict(self.drafter_statistics),
        }


def _nested(counts: Counter[tuple[int, int]]) -> dict[int, dict[int, int]]:
    """Return counts by depth and rank as one mapping per depth."""
    nested: dict[int, dict[int, int]] = {}
    for (depth, rank), number in sorted(counts.items()):
        nested.setdefault(depth, {})[rank] = number
    return nested


def _summed(counts: Counter[tuple[int, int]], by: int) -> Counter[int]:
    """Return counts by depth and rank, summed by depth (0) or rank (1)."""
    summed: Counter[int] = Counter()
    for depth_and_rank, count in counts.items():
        summed[depth_and_rank[by]] += count
    return summed
