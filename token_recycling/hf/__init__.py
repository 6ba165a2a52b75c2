"""The library inside transformers' own `generate`.

A call passes these modules in order: `accelerate` turns the model into one of an accelerated class, which receives the
inputs that `generate` prepared; `call` checks the call and decodes it with `loop`; `handover` and `batch_ends` do the
work of transformers on a cache that the caller sees and on a whole batch.
"""
