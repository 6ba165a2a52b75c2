"""Drafting with a second causal model: how it reads a text, how a tree or a graph of drafts grows, what is verified."""
