"""Token Recycling: the store of candidates, and drafts from it."""
