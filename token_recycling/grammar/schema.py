"""JSON schemas as llguidance enforces them: rewritten to keywords that it holds outputs to exactly.

llguidance 1.9 names most keywords that it does not enforce, but not all: it reads some as another draft does
(`additionalItems` beside `prefixItems`), loses some between `anyOf` and their companions, rounds numbers beyond 2**53,
and takes repeated names for different properties. So a schema is walked from its root along its references, and what is
left of it has only keywords of draft 2020-12 whose meaning here was compared with `jsonschema`'s
(tests/grammar/test_schema.py). Several keywords are expressed by others: `dependentRequired` by `anyOf`, `oneOf` of
disjoint branches by `anyOf`, formats by patterns.

Everything else is listed as `Unenforced`, with the place of the keyword and the reason. Annotations and unknown
keywords mean nothing to a validator, and nothing here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urldefrag

from .complement import Complements, both, either
from .disjoint import Comparison
from .endless import prune
from .formats import FORMATS
from .json_values import TYPES, Schema, at_pointer, escaped, is_number, shown, strings, unescaped, unwritable
from .numbers import INTEGERS, LARGEST_MULTIPLE, inclusive, inexact, too_many_remainders
from .parts import IN_PLACE, Part, is_count, keywords
from .patterns import WRITABLE, before_a_newline, translated
from .references import References, is_resource

MAX_DEPTH, MAX_NODES = 100, 50_000
"""Most levels that schemas are nested, and schemas in one; each costs some microseconds."""
_MAX_ARRAYS, _MAX_DIFFERENT = 500, 100
"""Most arrays of different items of a schema, and items of one."""
_MAX_CHOICES = 50
"""Most choices of properties by which their number is expressed."""
_MAX_SHARING = 8
"""Most branches of `oneOf` that share values: their number is squared."""
_COMPLEMENTS = "types, ranges, lengths, constants but arrays and objects, and properties that have these or are missing"
"""What `Complements` knows the other values of."""
_MAX_NAMES = {"properties": 2_000, "patternProperties": 50}
"""Most names and patterns of one object: time grows with their square."""


class Unenforced(NamedTuple):
    """A keyword that outputs are not held to."""

    place: str
    """JSON pointer to the keyword, as a fragment."""
    why: str
    mistaken: bool = False
    """Whether no schema has such a keyword: its value is of the wrong kind, or refers to nothing."""

    @property
    def keyword(self) -> str:
        """Return its name."""
        return unescaped(self.place.rpartition("/")[2])

    def __str__(self) -> str:
        return f"{self.place}: {self.why}"


class UnenforceableError(ValueError):
    """A schema with keywords that cannot be enforced, where they must be, or with mistakes."""

    def __init__(self, unenforced: Sequence[Unenforced]) -> None:
        shown = "; ".join(map(str, unenforced[:5])) + ("; ..." if len(unenforced) > 5 else "")
        fix = "correct the schema" if unenforced[0].mistaken else "leave these keywords out, or ask without strict"
        super().__init__(f"{shown}; {fix}")
        self.unenforced = unenforced


@dataclass
class Enforceable:
    """A schema with only keywords that can be enforced."""

    schema: Schema
    unenforced: list[Unenforced]
    """The others."""
    parts: list[Part]
    """Every schema within it, the innermost first."""

    @property
    def definitions(self) -> dict[str, Any]:
        """The schemas that others refer to, by name."""
        return self.schema.get("$defs", {}) if isinstance(self.schema, dict) else {}


def enforceable(schema: Schema, closed: bool) -> Enforceable:
    """Return the schema as far as it can be enforced.

    If `closed`, objects with `properties` have no others unless the schema says so. Raise ValueError for a schema that
    is none, is too large, or whose values would never end.
    """
    walk = _Walk(schema, closed)
    walk.dialect()
    root = walk.subschema(schema, "#", "#", closed)
    walk.definitions()
    if isinstance(root, dict):
        if walk.defs:
            root["$defs"] = walk.defs
        prune(root, walk.parts)
    return Enforceable(root, walk.unenforced, walk.parts)


_SINCE = {"const": "06", "if": "07", "minContains": "2019-09", "prefixItems": "2020-12"}
"""The first draft with a keyword which changes what others mean: to validators of earlier ones it means nothing."""


@dataclass
class _Walk:
    """One pass over the schemas of a document that its root refers to."""

    document: Schema
    closing: bool
    """Whether objects are closed where they may be."""
    unenforced: list[Unenforced] = field(default_factory=list)
    defs: dict[str, Schema] = field(default_factory=dict)
    """Schemas that others refer to, by new names."""
    parts: list[Part] = field(default_factory=list)
    """Every schema, the innermost first."""

    def __post_init__(self) -> None:
        self._names: dict[tuple[str, bool], str] = {}
        """For each place that is referred to, and whether its objects are closed, its name."""
        self._pending: list[tuple[str, str, bool]] = []
        self._nodes = 0
        self.references = References(self.document)
        self.comparison = Comparison(self.document, self.references)
        self.complements = Complements(self.document, self.references, self.comparison)

    def dialect(self) -> None:
        """Note a dialect that is none, or has other keywords than those known here."""
        named = self.document.get("$schema", "") if isinstance(self.document, dict) else ""
        if not isinstance(named, str):
            self.note("#", "$schema", f"must be a string, got {shown(named)}", mistaken=True)
        elif self.references.draft < "04":
            self.note("#", "$schema", f"draft {self.references.draft} is not supported; drafts from 04 on are")

    def definitions(self) -> None:
        """Fill in the schemas that others refer to."""
        while self._pending:
            place, resource, closed = self._pending.pop()
            schema = at_pointer(self.document, place)
            self.defs[self._names[place, closed]] = self.subschema(schema, place, resource, closed)

    def note(self, place: str, keyword: str, why: str, mistaken: bool = False) -> None:
        """List a keyword as unenforced, once."""
        entry = Unenforced(f"{place}/{escaped(keyword)}", why, mistaken)
        if entry not in self.unenforced[-50:]:
            self.unenforced.append(entry)

    def subschema(self, schema: Any, place: str, resource: str, closed: bool) -> Schema:
        """Return one schema as it can be enforced; `resource`: the place of the schema whose base URI it has; `closed`:
        whether its objects may be closed.
        """
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise ValueError(f"{place}: a schema must be an object or a boolean, got {shown(schema)}")
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise ValueError(f"the schema has more than {MAX_NODES:,} parts; make it smaller")
        if place.count("/") > MAX_DEPTH:
            raise ValueError(f"{place[:80]}...: schemas are nested in more than {MAX_DEPTH} levels; nest fewer")
        if place != "#" and is_resource(schema):
            resource = place
        return _Node(self, schema, place, resource, closed).result()

    def reference(self, reference: Any, place: str, resource: str, closed: bool) -> Schema | None:
        """Return a reference to the schema that `$ref` names; None if there is none."""
        target = self.references.resolved(reference, resource)
        if target is None:
            if isinstance(reference, str):
                external = bool(urldefrag(reference).url)
                why = "refers to another document" if external else "refers to nothing in the schema"
                self.note(place, "$ref", f"{shown(reference)} {why}", mistaken=True)
            else:
                self.note(place, "$ref", f"must be a string, got {shown(reference)}", mistaken=True)
            return None
        name = self._names.get((target[0], closed))
        if name is None:
            name = self._names[target[0], closed] = str(len(self._names))
            self._pending.append((*target, closed))
        return {"$ref": f"#/$defs/{name}"}


class _Node:
    """One schema, and what of it can be enforced: one schema of its own keywords, and others for the same value."""

    def __init__(self, walk: _Walk, schema: dict[str, Any], place: str, resource: str, closed: bool) -> None:
        self._walk, self._schema, self._place, self._resource = walk, schema, place, resource
        self._closed = closed
        self._own: dict[str, Any] = {}
        """Its keywords about values themselves."""
        self._others: list[Schema] = []
        """Schemas for the same value."""
        self._kinds = set(TYPES)

    def result(self) -> Schema:
        schema = self._schema
        composed = [name for name in IN_PLACE if name in schema]
        for keyword, draft in _SINCE.items():
            if keyword in schema and self._walk.references.draft < draft:
                self._note(keyword, f"is no keyword of draft {self._walk.references.draft}, which $schema names")
        self._type()
        self._values()
        self._numbers()
        self._strings()
        if "array" in self._kinds:
            self._array(composed)
        self._unique()
        if "object" in self._kinds:
            self._object(composed)
        self._in_place()
        if self._own:
            self._walk.parts.append(Part(self._place, self._own, schema))
        result = self._conjunction()
        if isinstance(result, dict) and result is not self._own:
            self._walk.parts.append(Part(self._place, result, schema))
        return result

    def _conjunction(self) -> Schema:
        """Return its keywords together with the schemas for the same value."""
        own, others = self._own, [other for other in self._others if other is not True]
        if not others:
            return own or True
        if not own:
            return others[0] if len(others) == 1 else {"allOf": others}
        if next(iter(self._schema)) in IN_PLACE:
            return {"allOf": [*others, own]}
        own["allOf"] = others
        return own

    def _note(self, keyword: str, why: str, mistaken: bool = False) -> None:
        self._walk.note(self._place, keyword, why, mistaken)

    def _child(self, schema: Any, *names: str | int, closed: bool = True) -> Schema:
        place = "/".join([self._place, *(escaped(str(name)) for name in names)])
        return self._walk.subschema(schema, place, self._resource, closed and self._walk.closing)

    def _get(self, keyword: str, valid: Callable[[Any], bool], what: str) -> Any:
        """Return the value of a keyword; None if it is missing, or is none of those that are valid, which is noted."""
        value = self._schema.get(keyword)
        if keyword not in self._schema or valid(value):
            return value
        self._note(keyword, f"must be {what}, got {shown(value)}", mistaken=True)
        return None

    # Values

    def _type(self) -> None:
        kinds = self._schema.get("type")
        if "type" not in self._schema:
            return
        named = [kinds] if isinstance(kinds, str) else kinds
        if not isinstance(named, list) or not named or not all(kind in TYPES for kind in named):
            self._note(
                "type", f"must be one of {', '.join(TYPES)}, or a list of them, got {shown(kinds)}", mistaken=True
            )
            return
        self._kinds = {*named}
        if "number" in self._kinds:
            self._kinds.discard("integer")
        names = [name for name in dict.fromkeys(named) if name in self._kinds]
        self._own["type"] = names[0] if len(names) == 1 else names

    def _values(self) -> None:
        if "const" in self._schema:
            if (why := unwritable(self._schema["const"])) is None:
                self._own["const"] = self._schema["const"]
            else:
                self._note("const", why)
        values = self._get("enum", lambda value: isinstance(value, list), "a list")
        if values is not None:
            reasons = [why for value in values if (why := unwritable(value)) is not None]
            if reasons:
                self._note("enum", reasons[0])
            else:
                self._own["enum"] = values

    def _numbers(self) -> None:
        if not self._kinds & {"number", "integer"}:
            return
        low = self._bound("minimum", "exclusiveMinimum")
        high = self._bound("maximum", "exclusiveMaximum")
        if self._kinds & {"integer", "number", "string"} == {"integer"} and self._schema.get("format") in INTEGERS:
            least, most = INTEGERS[self._schema["format"]]
            low, high = [*low, ("minimum", least)], [*high, ("maximum", most)]
        whole = "number" not in self._kinds
        for name, bounds, strictest in (("minimum", low, max), ("maximum", high, min)):
            upward, limits = name == "minimum", list[float]()
            for keyword, value in bounds:
                limit = inclusive(value, keyword.startswith("exclusive"), upward, whole)
                if (limit if upward else -limit) >= 2**63:
                    self._note(keyword, f"{shown(value)} is beyond 2**63")
                else:
                    limits.append(limit)
            if limits:
                self._own[name] = strictest(limits)
        step = self._get("multipleOf", lambda value: is_number(value) and value > 0, "a number above 0")
        if step is None:
            return
        why = unwritable(step) or too_many_remainders(step)
        if why is None:
            self._own["multipleOf"] = step
            if not whole or isinstance(step, float):
                self._own["minimum"] = max(self._own.get("minimum", -LARGEST_MULTIPLE), -LARGEST_MULTIPLE)
                self._own["maximum"] = min(self._own.get("maximum", LARGEST_MULTIPLE), LARGEST_MULTIPLE)
            why = inexact(step)
        if why is not None:
            self._note("multipleOf", why)

    def _bound(self, name: str, exclusive: str) -> list[tuple[str, float]]:
        """Return the limits of one side; `exclusive` may be a boolean, as in draft 4."""
        value = self._get(name, is_number, "a number")
        other = self._get(exclusive, lambda value: isinstance(value, bool) or is_number(value), "a number")
        bounds = []
        if isinstance(other, bool):
            name = exclusive if other else name
        elif other is not None:
            bounds.append((exclusive, other))
        if value is not None:
            bounds.append((name, value))
        return bounds

    def _strings(self) -> None:
        if "string" not in self._kinds:
            return
        for name in ("minLength", "maxLength"):
            if (value := self._count(name)) is not None:
                self._own[name] = value
        pattern = self._get("pattern", lambda value: isinstance(value, str), "a string")
        if pattern is not None and (rust := self._translated("pattern", pattern)) is not None:
            self._own["pattern"] = rust
        name = self._get("format", lambda value: isinstance(value, str), "a string")
        if name is None:
            return
        if name not in FORMATS:
            self._note("format", f"{shown(name)} is not known")
        elif "pattern" in self._own:
            self._others.append({**FORMATS[name]})
        else:
            merged = {**FORMATS[name]}
            if "maxLength" in merged:
                merged["maxLength"] = min(merged["maxLength"], self._own.get("maxLength", merged["maxLength"]))
            self._own.update(merged)

    def _translated(self, keyword: str, pattern: str, either: bool = False) -> str | None:
        try:
            return translated(pattern, either)
        except ValueError as error:
            self._note(keyword, f"{shown(pattern)}: {error}")
            return None

    def _count(self, keyword: str) -> int | None:
        value = self._get(keyword, is_count, "a whole number below 2**32")
        return None if value is None else int(value)

    # Arrays

    def _array(self, composed: list[str]) -> None:
        schema = self._schema
        items, first = schema.get("items"), self._get("prefixItems", lambda value: isinstance(value, list), "a list")
        rest: tuple[Any, str] | None = None
        if isinstance(items, list):
            if first is None:
                self._own["prefixItems"] = [self._child(item, "items", number) for number, item in enumerate(items)]
            else:
                self._note("items", "must be a schema beside prefixItems, got a list")
            if "additionalItems" in schema:
                rest = schema["additionalItems"], "additionalItems"
        elif "items" in schema:
            rest = items, "items"
        if first is not None:
            self._own["prefixItems"] = [self._child(item, "prefixItems", number) for number, item in enumerate(first)]
        if not _is_free(schema.get("unevaluatedItems", True)):
            if composed or "contains" in schema:
                self._note("unevaluatedItems", "is not supported beside keywords that are about the same array")
            elif rest is None:
                rest = schema["unevaluatedItems"], "unevaluatedItems"
        if rest is not None:
            self._own["items"] = self._child(*rest)
        for name in ("minItems", "maxItems"):
            if (value := self._count(name)) is not None:
                self._own[name] = value
        if self._own.get("minItems", 0) > 0 and self._own.get("items") is False:
            self._own["maxItems"] = min(self._own.get("maxItems", 2**32), len(self._own.get("prefixItems", ())))

    def _unique(self) -> None:
        """Express that items differ, where it says so; in any schema: it may be for arrays, whatever its type says."""
        own, schema = self._own, self._schema
        if self._get("uniqueItems", lambda value: isinstance(value, bool), "a boolean"):
            most, first = own.get("maxItems", math.inf), schema.get("prefixItems", ())
            if own.get("items") is False:
                most = min(most, len(first))
            if most > 1 and not (own.get("items") is False and self._exclusive(first)):
                self._different_items(most)
        if "contains" in schema and not (schema.get("minContains") == 0 and "maxContains" not in schema):
            self._note("contains", "is not supported")

    def _different_items(self, most: float) -> None:
        """List all arrays of different items, of those that the schema lists."""
        own, items = self._own, self._schema.get("items")
        values = self._walk.comparison.listed(items, self._resource)
        alone = self._kinds == {"array"} and own.keys() <= {"type", "items", "minItems", "maxItems"}
        if values is None or not alone or unwritable(values) is not None:
            self._note("uniqueItems", "is supported of arrays whose items are listed by enum or const")
            return
        sizes = range(own.get("minItems", 0), int(min(most, len(values), _MAX_DIFFERENT)) + 1)
        if sum(math.perm(len(values), size) for size in sizes) > _MAX_ARRAYS:
            self._note("uniqueItems", f"is supported where at most {_MAX_ARRAYS} arrays have different items")
            return
        own.clear()
        own["enum"] = [list(array) for size in sizes for array in itertools.permutations(values, size)]

    # Objects

    def _object(self, composed: list[str]) -> None:
        schema, own = self._schema, self._own
        properties, patterns = self._named("properties"), self._named("patternProperties")
        required = self._get(
            "required",
            lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
            "a list of names",
        )
        if properties is not None:
            own["properties"] = {}
            for name, value_schema in properties.items():
                if (why := unwritable(name)) is not None:
                    self._note("properties", why)
                own["properties"][name] = self._child(value_schema, "properties", name)
        if required:
            reasons = [why for name in required if (why := unwritable(name)) is not None]
            if reasons:
                self._note("required", reasons[0])
            else:
                own["required"] = list(dict.fromkeys(required))
        if "additionalProperties" in schema:
            own["additionalProperties"] = self._child(schema["additionalProperties"], "additionalProperties")
        elif not _is_free(schema.get("unevaluatedProperties", True)):
            if composed:
                self._note("unevaluatedProperties", "is not supported beside keywords that are about the same object")
            else:
                rest = self._child(schema["unevaluatedProperties"], "unevaluatedProperties")
                own["additionalProperties"] = rest
        elif self._may_be_closed(composed):
            own["additionalProperties"] = False
            for name in own.get("required", ()):
                own["properties"].setdefault(name, True)
        if patterns is not None:
            self._patterns_of_names(patterns, own.get("additionalProperties", True))
        for name in ("minProperties", "maxProperties"):
            if (value := self._count(name)) is not None:
                own[name] = value
        names = self._get("propertyNames", lambda value: isinstance(value, dict | bool), "a schema")
        if names is not None and not _is_free(names):
            self._property_names(names)
        self._count_of_properties()

    def _patterns_of_names(self, patterns: dict[str, Any], rest: Any) -> None:
        """Express `patternProperties`; `rest`: the schema of other properties. A name that a pattern matches in one
        dialect alone is left out where there are no others, and satisfies the pattern's schema where others are free.
        """
        own = self._own["patternProperties"] = dict[str, Schema]()
        for pattern, value_schema in patterns.items():
            rust = self._translated("patternProperties", pattern, either=rest in (True, {}))
            if rust is None:
                continue
            own[rust] = self._child(value_schema, "patternProperties", pattern)
            if rest in (True, False, {}) or rust == translated(pattern, either=True):
                continue
            if (longer := before_a_newline(pattern)) is not None:
                own[longer] = False
            else:
                self._note("patternProperties", f"{shown(pattern)} matches other names in Python than in ECMA-262")

    def _named(self, keyword: str) -> dict[str, Any] | None:
        """Return the schemas of a keyword by name."""
        schemas = self._get(keyword, lambda value: isinstance(value, dict), "an object")
        if schemas is not None and len(schemas) > _MAX_NAMES[keyword]:
            raise ValueError(
                f"{self._place}/{keyword}: at most {_MAX_NAMES[keyword]:,} are supported, got {len(schemas):,}"
            )
        return schemas

    def _may_be_closed(self, composed: list[str]) -> bool:
        """Whether its objects, which may have any further properties, need none."""
        names = self._schema.keys() & {"properties", "patternProperties", "propertyNames"}
        return (
            self._closed
            and names == {"properties"}
            and isinstance(self._schema["properties"], dict)
            and all(
                _only_requires(self._schema[keyword], self._schema["properties"])
                for keyword in (*composed, *self._schema.keys() & {"then", "else"})
            )
        )

    def _property_names(self, names: Schema) -> None:
        """Express the names that properties may have by `patternProperties` or `properties`."""
        own = self._own
        if isinstance(names, dict) and keywords(names) == {"$ref"}:
            target = self._walk.references.resolved(names["$ref"], self._resource)
            names = names if target is None else at_pointer(self._walk.document, target[0])
        keys = keywords(names) - {"type"}
        if names is False:
            own["maxProperties"] = 0
        elif isinstance(names, dict) and names.get("type", "string") == "string" and not keys:
            return
        elif not isinstance(names, dict) or "patternProperties" in own or "properties" in own:
            self._note("propertyNames", "is not supported beside properties and patternProperties")
        elif keys == {"pattern"} and isinstance(names["pattern"], str):
            if (rust := self._translated("propertyNames", names["pattern"])) is not None:
                self._only_names(rust)
        elif keys <= {"minLength", "maxLength"} and all(is_count(names[key]) for key in keys):
            most = int(names["maxLength"]) if "maxLength" in keys else ""
            self._only_names(f"^{WRITABLE}{{{int(names.get('minLength', 0))},{most}}}$")
        elif keys == {"enum"} and strings(names["enum"]) == names["enum"]:
            rest = own.get("additionalProperties", True)
            own["properties"] = dict.fromkeys(names["enum"], rest)
            own["additionalProperties"] = False
        else:
            self._note("propertyNames", "is supported with a pattern, an enum or lengths alone")

    def _only_names(self, pattern: str) -> None:
        """Leave properties whose names match a pattern in Rust's syntax."""
        self._own["patternProperties"] = {pattern: self._own.get("additionalProperties", True)}
        self._own["additionalProperties"] = False

    def _count_of_properties(self) -> None:
        """Express how many properties there are: of listed ones by choices of them, of others as far as names could not
        be repeated to reach the number.
        """
        own = self._own
        required = own.get("required", ())
        optional = [
            name for name, schema in own.get("properties", {}).items() if schema is not False and name not in required
        ]
        least = own.get("minProperties", 0) - len(required)
        most = own.get("maxProperties", math.inf) - len(required)
        listed = own.get("additionalProperties") is False and not own.get("patternProperties")
        if least <= 0:
            own.pop("minProperties", None)
        elif listed:
            self._choice_of_properties("minProperties", optional, least, lambda names: {"required": names})
        elif least > 1:
            del own["minProperties"]
            self._note("minProperties", "above 1 is not supported where names are not listed: one could be repeated")
        if listed and most >= len(optional):
            own.pop("maxProperties", None)
        elif listed and most >= 0:
            missing = len(optional) - int(most)
            self._choice_of_properties(
                "maxProperties", optional, missing, lambda names: {"properties": dict.fromkeys(names, False)}
            )

    def _choice_of_properties(
        self, keyword: str, names: list[str], number: int, holds: Callable[[list[str]], Schema]
    ) -> None:
        """Express a keyword by what holds for one at least of the choices of a number of names."""
        del self._own[keyword]
        if math.comb(len(names), number) > _MAX_CHOICES:
            self._note(keyword, f"is supported where at most {_MAX_CHOICES} choices of names make it up")
        else:
            self._others.append(either(holds([*chosen]) for chosen in itertools.combinations(names, number)))

    # Schemas for the same value

    def _in_place(self) -> None:
        schema = self._schema
        for name in schema:
            if name == "$ref":
                alone = len(keywords(schema)) == 1
                target = self._walk.reference(schema["$ref"], self._place, self._resource, self._closed and alone)
                if target is not None:
                    self._others.append(target)
            elif name in ("allOf", "anyOf", "oneOf"):
                self._branches(name)
            elif name in ("dependentRequired", "dependentSchemas", "dependencies"):
                self._dependent(name)
            elif name == "not":
                self._not()
            elif name == "if" and schema.keys() & {"then", "else"}:
                self._conditional()
            elif name in ("$dynamicRef", "$recursiveRef"):
                self._note(name, "is not supported")

    def _branches(self, keyword: str) -> None:
        options = self._get(keyword, lambda value: isinstance(value, list) and len(value) > 0, "a list of schemas")
        if options is None:
            return
        alone = keywords(self._schema) == {keyword}
        closed = self._closed and alone and (keyword != "allOf" or len(options) == 1)
        choice = self._choice(options) if keyword == "allOf" else {}
        branches = [
            self._child(option, keyword, number, closed=closed)
            for number, option in enumerate(options)
            if number not in choice
        ]
        if keyword == "allOf":
            self._others += [*branches, *self._alternatives(choice)]
            return
        if keyword == "oneOf" and not self._exclusive(options):
            branches = self._each_alone(options, branches)
        self._others.append({"anyOf": branches})

    def _choice(self, options: Sequence[Any]) -> dict[int, Schema]:
        """Return the conditions among the schemas of `allOf` by their numbers, each with what does not meet it, where
        no value of this schema meets two of them; else none.
        """
        numbers = [number for number, option in enumerate(options) if _is_conditional(option)]
        conditions = [options[number]["if"] for number in numbers]
        if len(conditions) < 2 or self._walk.references.draft < _SINCE["if"]:
            return {}
        if not self._exclusive([{"allOf": [self._schema, condition]} for condition in conditions]):
            return {}
        others = {number: self._other_values(options[number]["if"]) for number in numbers}
        known = {number: other for number, other in others.items() if other is not None}
        return known if len(known) == len(others) else {}

    def _alternatives(self, choice: dict[int, Schema]) -> list[Schema]:
        """Return what conditions mean of which a value meets one or none: an alternative for each, and one for none.
        llguidance would make a power of two of them.
        """
        if not choice:
            return []
        options = self._schema["allOf"]
        holds, then, otherwise = (
            {
                number: self._child(options[number].get(name, True), "allOf", number, name, closed=False)
                for number in choice
            }
            for name in ("if", "then", "else")
        )
        one = [
            both([holds[met], then[met], *(otherwise[number] for number in choice if number != met)]) for met in choice
        ]
        return [either([*one, both([*choice.values(), *otherwise.values()])])]

    def _each_alone(self, options: Sequence[Any], branches: list[Schema]) -> list[Schema]:
        """Return the branches of `oneOf`, each without the values of the others."""
        others = [
            self._other_values(option, {"anyOf": [*options[:index], *options[index + 1 :]]})
            for index, option in enumerate(options)
        ]
        known = [other for other in others if other is not None]
        if len(known) < len(options) or len(options) > _MAX_SHARING:
            self._note("oneOf", f"is supported where no value is valid under two of its schemas, and of {_COMPLEMENTS}")
            return branches
        return [both([branch, *known[:index], *known[index + 1 :]]) for index, branch in enumerate(branches)]

    def _exclusive(self, options: Sequence[Any]) -> bool:
        return self._walk.comparison.exclusive(options, self._resource)

    def _other_values(self, schema: Any, beside: Schema = True) -> Schema | None:
        """Return the schema of those values of this schema, and of another, that are not valid under a third."""
        return self._walk.complements.of(schema, {"allOf": [self._schema, beside]}, self._resource)

    def _dependent(self, keyword: str) -> None:
        """Express each dependency: the property is missing, or what depends on it holds."""
        entries = self._get(keyword, lambda value: isinstance(value, dict), "an object")
        for name, dependency in (entries or {}).items():
            if isinstance(dependency, list):
                if strings(dependency) != dependency:
                    self._note(keyword, f"must have lists of names, got {shown(dependency)}", mistaken=True)
                holds: Schema = {"required": strings(dependency)} if dependency else True
            else:
                holds = self._child(dependency, keyword, name, closed=False)
            if holds is not True:
                self._others.append({"anyOf": [{"properties": {name: False}}, holds]})

    def _not(self) -> None:
        other = self._other_values(self._schema["not"])
        if other is None:
            self._note("not", f"is supported of {_COMPLEMENTS}")
        else:
            self._others.append(other)

    def _conditional(self) -> None:
        """Express that the condition holds with `then`, or does not with `else`."""
        condition, *consequences = (
            self._child(self._schema.get(name, True), name, closed=False) for name in ("if", "then", "else")
        )
        other = self._other_values(self._schema["if"])
        if other is None:
            self._note("if", f"is supported of {_COMPLEMENTS}")
        else:
            self._others.append(either(map(both, zip((condition, other), consequences, strict=True))))


# Parts of schemas


def _is_conditional(schema: Any) -> bool:
    """Whether a schema says what holds under a condition, and no more."""
    return keywords(schema) - {"then", "else"} == {"if"} and not is_resource(schema)


def _is_free(schema: Any) -> bool:
    """Whether a schema admits every value, and says so."""
    return schema is True or schema == {}


def _only_requires(composition: Any, properties: Any) -> bool:
    """Whether the schemas of `anyOf` and the like say only which of the properties are required."""
    branches = composition if isinstance(composition, list) else [composition]
    return all(
        isinstance(branch, dict)
        and keywords(branch) <= {"required"}
        and {*strings(branch.get("required"))} <= {*properties}
        for branch in branches
    )
