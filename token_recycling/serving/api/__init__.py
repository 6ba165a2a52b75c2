"""The APIs. Each module converts a request body into generations, and their outputs into a response."""
