"""What is known of next tokens."""
