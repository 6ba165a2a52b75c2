"""Draft trees, and the values that pass between the loop and a drafter."""
