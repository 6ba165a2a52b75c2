"""Parts that several drafters use."""
