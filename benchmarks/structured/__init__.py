"""Answers of a given form with the real model: schemas, function calls, regular expressions."""
