"""Training of drafters' parts: an EAGLE head, Medusa heads, an acceptance head; see `token-recycling train`."""
