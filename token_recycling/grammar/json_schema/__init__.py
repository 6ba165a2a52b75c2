"""Rewrites JSON schemas to keywords that llguidance enforces exactly.

llguidance 1.9 reports most keywords that it does not enforce, but not all. It reads some like another draft
(`additionalItems` next to `prefixItems`), loses some that are combined with `anyOf`, rounds numbers beyond 2**53, and
counts repeated names as different properties. So a schema is walked from its root along its references. The result has
only keywords of draft 2020-12 whose meaning was compared with `jsonschema` (tests/grammar/test_schema.py). Some
keywords are expressed by others: `dependentRequired` by `anyOf`, `oneOf` with disjoint branches by `anyOf`, formats by
patterns.

All other keywords are listed as `Unenforced`, with the place of the keyword and the reason. Annotations and unknown
keywords are ignored, as in validators.

- `enforce` is the entry point: it returns the enforceable part of a schema. `walk` visits its subschemas as `Node`s.
- `scalars`, `arrays`, `objects` and `in_place` express the keywords of a node, with one function per keyword.
- `complement`, `disjoint` and `references` analyze the original schemas; `endless` analyzes the result.
- `keywords`, `numbers`, `patterns`, `lookahead`, `formats` and `json_values` have facts about drafts, validators, and
  llguidance. `errors` reports keywords that cannot be enforced, and parts without a value.
"""
