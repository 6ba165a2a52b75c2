"""What a forward pass costs, and how many nodes pay."""
