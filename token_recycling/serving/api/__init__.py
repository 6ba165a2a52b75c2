"""The APIs: each module converts the body of a request into generations, and their outputs into a response."""
