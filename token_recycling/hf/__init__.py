"""The library inside transformers' own `generate`.

A call passes these modules in order: `accelerate` makes the model one of an accelerated class, which receives what
`generate` prepared; `call` checks it and decodes it by `loop`; `handover` and `batch_ends` do what transformers would
have done for a cache that the caller sees and for a whole batch.
"""
