"""Small parts that know nothing of decoding."""
