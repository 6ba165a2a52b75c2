"""Parts shared by several drafters."""
