"""A recursive descent parser for arithmetic expressions."""

import re

TOKEN = re.compile(r"\s*(?:(\d+\.?\d*)|(.))")


class ParseError(ValueError):
    pass


class Parser:
    def __init__(self, text):
        self.tokens = []
        for number, operator in TOKEN.findall(text):
            if number:
                self.tokens.append(("number", float(number)))
            else:
                self.tokens.append(("operator", operator))
        self.tokens.append(("end", None))
        self.pos = 0

    def peek(self):
        return self.tokens[self.pos]

    def next(self):
        token = self.tokens[self.pos]
        self.pos += 1
        return token

    def parse_expression(self):
        """expression: term (('+' | '-') term)*"""
        value = self.parse_term()
        while self.peek() in [("operator", "+"), ("operator", "-")]:
            _, operator = self.next()
            right = self.parse_term()
            if operator == "+":
                value = value + right
            else:
                value = value - right
        return value

    def parse_term(self):
        """term: factor (('*' | '/') factor)*"""