"""The page that a run leaves, with its plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

from .clients import FAILURES, Exchange
from .faults import Faults
from .planted import Seen
from .server import Sample

matplotlib.use("svg")
from matplotlib import pyplot

_OUTCOMES = ("good", "tie", "refused", "left", "ended", "lost", *FAILURES)


@dataclass
class Found:
    """All that a run found."""

    command: str
    minutes: float
    exchanges: list[Exchange]
    samples: list[Sample]
    faults: Faults
    seen: Sequence[Seen]
    log_megabytes: float

    @property
    def failures(self) -> list[str]:
        """What must not have happened."""
        found = [f"{one.kind}: {one.outcome}: {one.what}" for one in self.exchanges if one.outcome in FAILURES]
        found += self.faults.wrong
        found += [f"{one.key} saw what another key asked for" for one in self.seen[:2] if not one.equal]
        found += ["the control saw no secret" for one in self.seen[2:] if one.equal]
        return found


def write(found: Found, page: Path) -> None:
    """Writes the page, and its plots into a folder beside it."""
    plots = page.with_suffix("")
    plots.mkdir(parents=True, exist_ok=True)
    _resources(found.samples, plots / "resources.svg")
    _waiting(found.exchanges, plots / "seconds.svg")
    page.write_text(_text(found, plots.name), encoding="utf-8")


def _text(found: Found, plots: str) -> str:
    failures = found.failures
    happened = Counter(found.faults.happened)
    lines = [
        "# The server under strain",
        "",
        f"`{found.command}` ran for {found.minutes:.0f} minutes: {len(found.exchanges):,} requests of mixed clients "
        f"while {sum(happened.values())} things happened to the server. "
        + (f"{len(failures)} things went wrong." if failures else "Nothing went wrong."),
        "",
        "Every text was compared with `generate`'s. Refused: the server was full and said so. Tie: two tokens are "
        "equally likely, to the rounding of a pass. Left: the client went away. Lost, ended: the server was being "
        "ended.",
        "",
        f"| client | {' | '.join(_OUTCOMES)} | median seconds | slowest |",
        f"|---|{'---|' * (len(_OUTCOMES) + 2)}",
    ]
    for kind in sorted({one.kind for one in found.exchanges}):
        own = [one for one in found.exchanges if one.kind == kind]
        counts = Counter(one.outcome for one in own)
        seconds = sorted(one.seconds for one in own)
        cells = [str(counts[outcome]) if counts[outcome] else "" for outcome in _OUTCOMES]
        lines.append(f"| {kind} | {' | '.join(cells)} | {seconds[len(seconds) // 2]:.2f} | {seconds[-1]:.1f} |")
    lines += ["", "## What happened to it", "", "| | times |", "|---|---|"]
    lines += [f"| {_WORDS[name]} | {times} |" for name, times in happened.items()]
    if not found.faults.mounted:
        lines += ["", "Its disk was left alone: for that the user must be allowed to mount a file system in memory."]
    lines += [
        "",
        f"After each, every matrix file was read: all were whole. The log grew to {found.log_megabytes:.1f} MB.",
        "",
        "## Memory and descriptors",
        "",
        f"![Memory, descriptors and threads of every life of the server]({plots}/resources.svg)",
        "",
        _growth(found.samples),
        "",
        f"![How long requests took]({plots}/seconds.svg)",
        "",
        "## What one key can learn of another",
        "",
        "Secrets were planted through one key; their beginnings were sent by another key and, as a control, by the "
        "same one, and compared with a server that never saw them. *Before*: beginnings that were never planted.",
        "",
        "| key | probes | texts, steps, drafts, tokens kept | tokens a step, planted and not | time of a step | p "
        "| to the first token |",
        "|---|---|---|---|---|---|---|",
    ]
    for one, who in zip(found.seen, ("another key, before", "another key", "the one that planted them"), strict=False):
        same = "the same" if one.equal else "differ"
        mat = f"{one.mat[0]:.2f}, {one.mat[1]:.2f}"
        lines.append(
            f"| {who} | {one.probes} | {same} | {mat} | {one.seconds:.3f} times | {one.chance:.2g} "
            f"| {one.first:.3f} times |"
        )
    lines += [
        "",
        "p is the chance that times of one distribution differ as much. "
        "[What stays visible](isolation.md) in every mode.",
    ]
    ties = [one.what for one in found.exchanges if one.outcome == "tie"]
    if ties:
        lines += ["", "## Ties", "", *[f"- {tie}" for tie in ties[:50]]]
    if failures:
        lines += ["", "## What went wrong", "", *[f"- {failure}" for failure in failures[:50]]]
    return "\n".join(lines) + "\n"


_WORDS = {
    "killed": "killed (SIGKILL) and started again",
    "terminated": "ended (SIGTERM) while texts were streamed, and started again",
    "jumping_clock": "started again with a clock that jumps by up to a day every three seconds",
    "disk_full": "the disk of the matrix full for ten seconds",
    "read_only": "the folder of the matrix read-only for ten seconds",
}


def _growth(samples: Sequence[Sample]) -> str:
    """How much more the longest life held in its last third than in its second."""
    lives = Counter(sample.life for sample in samples)
    if not lives or max(lives.values()) < 9:
        return "No life of the server was long enough to say whether it grows."
    life = max(lives, key=lambda life: lives[life])
    own = [sample for sample in samples if sample.life == life]
    third = len(own) // 3
    middle, last = own[third : 2 * third], own[2 * third :]
    memory = [np.median([sample.memory for sample in part]) for part in (middle, last)]
    descriptors = [max(sample.descriptors for sample in part) for part in (middle, last)]
    return (
        f"In the longest life, {own[-1].at - own[0].at:.0f} seconds, memory was {memory[0]:.0f} MB in the second third "
        f"and {memory[1]:.0f} MB in the last (medians), descriptors at most {descriptors[0]} and {descriptors[1]}."
    )


def _resources(samples: Sequence[Sample], file: Path) -> None:
    figure, axes = pyplot.subplots(3, sharex=True, figsize=(8, 5), layout="constrained")
    at = np.array([sample.at / 60 for sample in samples])
    lives = np.array([sample.life for sample in samples])
    for axis, name in zip(axes, ("memory", "descriptors", "threads"), strict=True):
        values = np.array([getattr(sample, name) for sample in samples], float)
        for life in np.unique(lives):
            axis.plot(at[lives == life], values[lives == life], linewidth=1.2, color=f"C{life % 2}")
        axis.set_ylim(0, None)
        axis.set_ylabel("memory, MB" if name == "memory" else name)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("minutes; the colour changes with every start")
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)


def _waiting(exchanges: Sequence[Exchange], file: Path) -> None:
    figure, axis = pyplot.subplots(figsize=(8, 3), layout="constrained")
    for kind in ("completion", "stream", "chat", "several texts"):
        seconds = np.sort([one.seconds for one in exchanges if one.kind == kind and one.outcome == "good"])
        if len(seconds):
            axis.plot(seconds, np.arange(1, len(seconds) + 1) / len(seconds), label=kind)
    axis.set_xscale("log")
    axis.set_xlabel("seconds from request to last token")
    axis.set_ylabel("share of good answers")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(file, metadata={"Date": None})
    pyplot.close(figure)
