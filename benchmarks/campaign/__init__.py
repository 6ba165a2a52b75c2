"""The random campaign: seeded random calls of random models, compared with transformers' own `generate`.

A case is a program. `dimensions` is the table of what can be chosen, `case` draws from it, `program` writes what was
drawn as a script of torch, transformers and token_recycling alone, `run` executes it and says how it ended, `minimise`
drops what the failure does not need, `report` adds up. docs/measuring.md says how to run it.
"""
