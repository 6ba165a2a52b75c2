"""JSON schemas as llguidance enforces them: rewritten to keywords that it holds outputs to exactly.

llguidance 1.9 names most keywords that it does not enforce, but not all: it reads some as another draft does
(`additionalItems` beside `prefixItems`), loses some between `anyOf` and their companions, rounds numbers beyond 2**53,
and takes repeated names for different properties. So a schema is walked from its root along its references, and what is
left of it has only keywords of draft 2020-12 whose meaning here was compared with `jsonschema`'s
(tests/grammar/test_schema.py). Several keywords are expressed by others: `dependentRequired` by `anyOf`, `oneOf` of
disjoint branches by `anyOf`, formats by patterns.

Everything else is listed as `Unenforced`, with the place of the keyword and the reason. Annotations and unknown
keywords mean nothing to a validator, and nothing here.

- `enforce` begins: a schema, and what of it can be enforced. `walk` visits its parts, each a `Node`.
- `scalars`, `arrays`, `objects` and `in_place` express the keywords of a node, each keyword in one function.
- `complement`, `disjoint` and `references` answer questions about schemas as they were written; `endless` one about the
  result.
- `keywords`, `numbers`, `patterns`, `lookahead`, `formats` and `json_values` have the facts: of drafts, validators and
  llguidance. `errors` says what cannot be enforced, and what has no value.
"""
