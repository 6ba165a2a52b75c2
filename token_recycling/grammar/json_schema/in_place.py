"""Keywords with schemas for the same value: references, compositions and conditions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .complement import EXPRESSIBLE, both, either, known
from .json_values import Schema, shown, strings
from .keywords import keywords
from .references import is_resource
from .walk import Node

_MAX_SHARING = 8
"""Maximum branches of a `oneOf` whose branches share values: the result grows with the square of their number."""


def express(node: Node) -> None:
    """Express the keywords with schemas for the same value, in their order."""
    for keyword in node.schema:
        if keyword in _FUNCTIONS:
            _FUNCTIONS[keyword](node, keyword)


def _reference(node: Node, keyword: str) -> None:
    target = node.reference(keyword)
    if target is not None:
        node.others.append(target)


# Compositions


def _options(node: Node, keyword: str) -> list[Any]:
    """Return the schemas of a composition; an empty list, with a note, if it is not a list."""
    options = node.get(keyword, lambda value: isinstance(value, list) and len(value) > 0, "a list of schemas")
    return options or []


def _all_of(node: Node, keyword: str) -> None:
    """Express `allOf`; mutually exclusive conditions among its schemas become one choice."""
    options = _options(node, keyword)
    closed = node.closed and node.is_only(keyword) and len(options) == 1
    choice = _choice(node, options)
    node.others += [
        node.child(option, keyword, number, closed=closed)
        for number, option in enumerate(options)
        if number not in choice
    ]
    if choice:
        node.others.append(_alternatives(node, options, choice))


def _any_of(node: Node, keyword: str) -> None:
    if options := _options(node, keyword):
        node.others.append({"anyOf": _branches(node, keyword, options)})


def _one_of(node: Node, keyword: str) -> None:
    """Express `oneOf` by `anyOf`; branches that share values exclude the values of the other branches."""
    if not (options := _options(node, keyword)):
        return
    branches = _branches(node, keyword, options)
    if len(options) > 1 and all(map(node.constrains_only_objects, options)):
        node.kinds &= {"object"}  # other values are valid under all of them
        node.others.append({"type": "object"})
    others = {name: value for name, value in node.schema.items() if name not in ("anyOf", "oneOf")}
    beside = {"type": sorted(node.kinds)}, others
    closed = map(node.closed_objects, options) if node.closed and node.is_only(keyword) else ()
    alone, written = ([{"allOf": [*beside, option]} for option in schemas] for schemas in (options, closed))
    if not node.exclusive(alone, written):
        complements = [
            node.complement(option, {"anyOf": [*options[:number], *options[number + 1 :]]})
            for number, option in enumerate(options)
        ]
        apart = known(_apart(node, alone, complements, number) for number in range(len(options)))
        if apart is None or len(options) > _MAX_SHARING:
            why = f"is supported only if no value is valid under two of its schemas, or for {EXPRESSIBLE}"
            node.note(keyword, why)
        else:
            branches = [both(parts) for parts in zip(branches, apart, strict=True)]
    node.others.append({"anyOf": branches})


def _apart(node: Node, options: Sequence[Any], complements: Sequence[Schema | None], number: int) -> Schema | None:
    """Return a schema that excludes the values of all branches except one: the complements of the others or, if
    unknown, the absence of properties that the others require.
    """
    others = [
        node.lacking(other, options[number]) if complement is None else complement
        for place, (other, complement) in enumerate(zip(options, complements, strict=True))
        if place != number
    ]
    parts = known(others)
    return None if parts is None else both(parts)


def _branches(node: Node, keyword: str, options: Sequence[Any]) -> list[Schema]:
    closed = node.closed and node.is_only(keyword)
    branches = [node.child(option, keyword, number, closed=closed) for number, option in enumerate(options)]
    within = node.within_branches or {(number,): True for number in range(len(branches))}
    return [both([*(branches[number] for number in chosen), schema]) for chosen, schema in within.items()]


# Conditions


def _not(node: Node, keyword: str) -> None:
    complement = _complement(node, keyword)
    if complement is not None:
        node.others.append(complement)


def _if(node: Node, keyword: str) -> None:
    """Express that the condition holds and `then` does, or that it does not hold and `else` does."""
    if not node.schema.keys() & {"then", "else"}:
        return
    condition, *consequences = (
        node.child(node.schema.get(name, True), name, closed=False) for name in ("if", "then", "else")
    )
    complement = _complement(node, keyword)
    if complement is not None:
        node.others.append(either(map(both, zip((condition, complement), consequences, strict=True))))


def _complement(node: Node, keyword: str) -> Schema | None:
    """Return the complement of the schema of a keyword; None, with a note, if it cannot be expressed."""
    excluded = node.schema[keyword]
    if keywords(excluded) == {"not"}:
        return node.child(excluded["not"], keyword, "not", closed=False)
    complement = node.complement(excluded)
    if complement is None:
        node.note(keyword, f"is supported only for {EXPRESSIBLE}")
    return complement


def _choice(node: Node, options: Sequence[Any]) -> dict[int, Schema]:
    """Return the complements of the conditions among the schemas of `allOf`, by index, if no value of the node meets
    two of the conditions; else {}.
    """
    numbers = [number for number, option in enumerate(options) if _is_conditional(option)]
    conditions = [options[number]["if"] for number in numbers]
    if len(conditions) < 2 or not node.walk.references.knows("if"):
        return {}
    if not node.exclusive([{"allOf": [node.schema, condition]} for condition in conditions]):
        return {}
    complements = known(map(node.complement, conditions))
    return {} if complements is None else dict(zip(numbers, complements, strict=True))


def _is_conditional(schema: Any) -> bool:
    """Return whether a schema is only a condition with its consequences."""
    return keywords(schema) - {"then", "else"} == {"if"} and not is_resource(schema)


def _alternatives(node: Node, options: Sequence[Any], choice: dict[int, Schema]) -> Schema:
    """Return a schema for conditions of which a value meets at most one: an alternative for each, and one for none.
    llguidance would expand them to a power of two.
    """
    holds, then, otherwise = (
        {number: node.child(options[number].get(name, True), "allOf", number, name, closed=False) for number in choice}
        for name in ("if", "then", "else")
    )
    one = [both([holds[met], then[met], *(otherwise[number] for number in choice if number != met)]) for met in choice]
    return either([*one, both([*choice.values(), *otherwise.values()])])


def _dependent(node: Node, keyword: str) -> None:
    """Express each dependency: the property is missing, or the dependent schema holds."""
    entries = node.get(keyword, lambda value: isinstance(value, dict), "an object")
    for name, dependency in (entries or {}).items():
        if isinstance(dependency, list):
            if strings(dependency) != dependency:
                node.note(keyword, f"must have lists of names, got {shown(dependency)}", mistaken=True)
            holds: Schema = {"required": strings(dependency)} if dependency else True
        else:
            holds = node.child(dependency, keyword, name, closed=False)
        if holds is not True:
            node.others.append({"anyOf": [{"properties": {name: False}}, holds]})


_FUNCTIONS: dict[str, Callable[[Node, str], None]] = {
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), _reference),
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), _dependent),
}
