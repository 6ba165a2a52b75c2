"""The shape of a draft, and what passes between loop and drafter."""
