"""Training of drafter parts: an EAGLE head, Medusa heads, an acceptance head; see `token-recycling train`."""
