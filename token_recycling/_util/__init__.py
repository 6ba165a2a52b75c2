"""Small utilities that are independent of decoding."""
