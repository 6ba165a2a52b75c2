"""A case: what is drawn from the dimensions. It is a pure function of a seed and a number."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields
from typing import Literal

from . import dimensions as dim


@dataclass(frozen=True)
class DrafterChoice:
    """A drafter: options and their source code, the parts of a fusion among them."""

    name: str = "published"
    options: tuple[tuple[str, str], ...] = ()
    parts: tuple[DrafterChoice, ...] = ()

    @property
    def code(self) -> str:
        options = [f"{name}={code}" for name, code in self.options]
        if self.name == "garbage":
            return f"Garbage({', '.join(options)})"
        if self.parts:
            options.insert(0, f"parts=[{', '.join(part.code for part in self.parts)}]")
        return f"tr.make_drafter({', '.join([repr(self.name), *options])})"

    @property
    def draws(self) -> bool:
        """Whether it draws tokens itself where the text is sampled, so that a seed gives another text."""
        return ("sampled", "True") in self.options or any(part.draws for part in self.parts)


@dataclass(frozen=True)
class Call:
    """One call of `generate`."""

    rows: tuple[tuple[int, ...], ...]
    """Ids of the prompts: one text, a batch or, in threads, texts at once; of a turn, what is added to the text."""
    new: int = 8
    continues: bool = False
    """Whether it goes on from what the call before returned."""
    choice: Literal["greedy", "seeded", "one choice"] = "greedy"
    """`one choice`: sampled from the likeliest token alone, where draws come in another order than in `generate`."""
    masked: bool = False
    """Whether one text has an attention mask; several always have."""
    spare: int = 0
    """Columns of padding before the longest text, where there is a mask."""
    options: tuple[str, ...] = ()
    event: str = ""

    @property
    def together(self) -> bool:
        """Whether several texts are in one pass."""
        return self.three or (self.event != "in threads" and len(self.rows) > 1)

    @property
    def three(self) -> bool:
        """Whether three samples of each text are wanted."""
        return "three samples" in self.options


@dataclass(frozen=True)
class Case:
    """A model, what accelerates it, and calls. The defaults are the simplest values, to which `minimise` goes back."""

    calls: tuple[Call, ...]
    family: str = "llama"
    seed: int = 0
    attention: str = ""
    positions: int = 256
    """How many the model was made for."""
    repeats: bool = False
    """Whether layers add little to the newest token's embedding, so that texts repeat themselves."""
    weights: str = "float32"
    drafter: DrafterChoice = DrafterChoice()
    surface: str = "accelerate"
    fast: bool = False
    copied: str = ""
    cache: str = ""
    costs: float = 0.005

    @property
    def threads(self) -> bool:
        """Whether texts are decoded at once in several threads."""
        return any(call.event == "in threads" for call in self.calls)


def draw(seed: int, number: int) -> Case:
    """Case `number` of a seed."""
    random_ = random.Random(f"{seed}/{number}")
    family = random_.choice(dim.COMMON if random_.random() < 0.4 else list(dim.FAMILIES))
    replaceable = family in dim.PLAIN_LINEAR
    weights = random_.choices(list(dim.WEIGHTS), (0.8, 0.07, 0.01, 0.12))[0] if replaceable else "float32"
    surface = random_.choices(list(dim.SURFACES), (0.6, 0.15, 0.1, 0.15))[0]
    recurrent = family in dim.RECURRENT
    drafter = _drafter(random_)
    while recurrent and {drafter.name, *(part.name for part in drafter.parts)} & dim.WITH_MODELS:
        drafter = _drafter(random_)
    inline = weights == "adapter" or weights == "int8 weights" or "Garbage" in drafter.code
    copies = [copy for copy in dim.COPIES if not (copy == "pickled" and inline)]
    cache = random_.choices(list(dim.CACHES), (0.66, 0.12, 0.04, 0.06, 0.08, 0.04))[0]
    named = dim.CACHES[cache].startswith("cache_implementation")
    dropped = ("passed in" in cache or cache == "offloaded") and dim.DROPS_CACHE in family
    if dropped or (named and surface == "stream") or ("static" in cache and family in dim.NOT_STATIC):
        cache = ""
    if recurrent and (cache != "passed in" or family in dim.NOT_SHARED):
        cache = ""
    base = Case(
        (),
        family=family,
        seed=random_.randrange(3),
        attention=random_.choices(["", "eager"], (0.8, 0.2))[0],
        positions=random_.choices(list(dim.POSITIONS), list(dim.POSITIONS.values()))[0],
        repeats=random_.random() < 0.5,
        weights=weights,
        drafter=drafter,
        surface=surface,
        fast=not recurrent and random_.random() < 0.4,
        copied=random_.choice(copies) if surface == "accelerate" and random_.random() < 0.2 else "",
        cache=cache,
        costs=random_.choice(dim.COSTS),
    )
    calls: list[Call] = []
    for _ in range(random_.choices((1, 2, 3), (0.45, 0.4, 0.15))[0]):
        calls.append(_call(random_, base, calls))
    return Case(
        tuple(calls), **{field.name: getattr(base, field.name) for field in fields(base) if field.name != "calls"}
    )


def _drafter(random_: random.Random, parts: bool = True) -> DrafterChoice:
    name = random_.choice([*dim.DRAFTERS, *(["recycling", "fuse"] if parts else [])])
    if name == "fuse":
        chosen = tuple(_drafter(random_, parts=False) for _ in range(random_.choice((2, 2, 3))))
        nodes = random_.choice(["1", "6", "24", "'auto'"])
        paying = (("asks", "'paying'"),) if nodes == "'auto'" and random_.random() < 0.5 else ()
        return DrafterChoice("fuse", (("nodes", nodes), *paying), chosen)
    options = dict(random_.choice(dim.REQUIRED[name])) if name in dim.REQUIRED else {}
    if name == "garbage":
        options["seed"] = str(random_.randrange(9))
    for option, values in dim.DRAFTERS[name].items():
        if random_.random() < 0.35:
            options[option] = repr(random_.choice(values))
    return DrafterChoice(name, tuple(options.items()))


def _call(random_: random.Random, case: Case, before: list[Call]) -> Call:
    held = dim.CACHES[case.cache].startswith("transformers.")
    stream = case.surface == "stream"
    event = _event(random_, case, held)
    last = before[-1] if before else None
    can_go_on = last is not None and not ({last.event} & {"in threads", *dim.INTERRUPTIONS}) and not last.three
    continues = can_go_on and event != "in threads" and (held or random_.random() < 0.3)
    if last is not None and continues:
        size = len(last.rows)
    elif event == "in threads":
        size = random_.choice((2, 3))
    else:
        size = 1 if stream or random_.random() < (0.95 if case.fast else 0.65) else random_.choice((2, 3))
    draws = case.drafter.draws or case.fast
    choice = random_.choices(("greedy", "seeded", "one choice"), (0.55, 0.3, 0.15))[0]
    if choice == "seeded" and (draws or size > 1):
        choice = "one choice"
    if stream and choice == "one choice":
        choice = "greedy"
    alone = size == 1 and event != "in threads"
    captured = case.fast and random_.random() < 0.85
    options: list[str] = []
    for name, option in dim.OPTIONS.items():
        fits = (
            (option.steps or not stream) and (choice != "greedy" or not option.sampled) and (alone or not option.alone)
        )
        fits = fits and not any(name in group and group & set(options) for group in dim.TOGETHER)
        fits = fits and not (name == "streamer" and event in dim.INTERRUPTIONS)
        fits = fits and not (name in dim.NOT_CUSTOM and case.surface == "custom_generate")
        fits = fits and not (held and name == "three samples")
        fits = fits and not (captured and option.slow)
        fits = fits and not (name == "beams" and choice != "greedy")
        if fits and random_.random() < option.share:
            options.append(name)
    if "three samples" in options:
        choice, options = "one choice", [name for name in options if not dim.OPTIONS[name].alone]
    return Call(
        rows=_rows(random_, size, continues, before, case.positions > 256),
        new=random_.choice((1, 2, 3, 5, 8, 12, 16, 20, 24, 30, 40)),
        continues=continues,
        choice=choice,
        masked=random_.random() < 0.5,
        spare=0 if stream else random_.choices((0, 1, 5), (0.8, 0.15, 0.05))[0],
        options=tuple(options),
        event=event,
    )


def _event(random_: random.Random, case: Case, held: bool) -> str:
    changing = any(word in case.family for word in dim.ONE_THREAD)
    impossible = {
        "in threads": held or changing or bool(case.cache),
        "adapter switched": case.weights != "adapter",
        "in training": case.family not in dim.WITHOUT_DROPOUT,
        "weights changed": case.weights == "dynamic int8",
        "weights loaded": case.weights != "float32",
        "stream left": case.surface != "stream" or bool(case.cache),
        "streamer interrupts": case.surface in ("stream", "custom_generate"),
    }
    impossible |= {"processor raises": False} | {event: True for event in dim.INTERRUPTIONS if held}
    possible = {event: weight for event, weight in dim.EVENTS.items() if not impossible.get(event)}
    return random_.choices(list(possible), list(possible.values()))[0]


def _rows(
    random_: random.Random, size: int, continues: bool, before: list[Call], long: bool
) -> tuple[tuple[int, ...], ...]:
    """Random texts, repetitive ones, and those of the call before again."""
    fresh = [call for call in before if not call.continues and len(call.rows) == size]
    if fresh and not continues and random_.random() < 0.4:
        return fresh[-1].rows
    longest = 4 if continues else random_.choice((1, 2, 6, 12, 30))
    lengths = [random_.randint(1, longest) for _ in range(size)]
    if long and not continues:
        lengths = [random_.randint(*random_.choice(dim.LONG)) for _ in range(size)]
    if continues:
        lengths = [lengths[0]] * size
    rows = []
    for length in lengths:
        row = [random_.randrange(1, dim.VOCABULARY) for _ in range(length)]
        rows.append(tuple((row[: 1 + length // 3] * 3)[:length] if random_.random() < 0.5 else row))
    return tuple(rows)


def words(case: Case) -> dict[str, list[str]]:
    """What was drawn, in short words by dimension."""
    calls = case.calls
    ways = [f"{call.choice}, {'several' if call.together else 'one'}" for call in calls]
    return {
        "family": [case.family],
        "layers": ["with states" if case.family in dim.RECURRENT else "that attend"],
        "drafter": [case.drafter.name, *(f"fused {part.name}" for part in case.drafter.parts)],
        "surface": [case.surface],
        "fast": [str(case.fast)],
        "way": sorted(set(ways)),
        "option": sorted({option for call in calls for option in call.options}),
        "event": sorted({call.event for call in calls if call.event}),
        "cache": [case.cache or "its own"],
        "weights": [case.weights],
        "copied": [case.copied] if case.copied else [],
        "positions": [str(case.positions)],
        "attention": [case.attention or "as it comes"],
        "calls": [f"{len(calls)}{', going on' if any(call.continues for call in calls) else ''}"],
    }
