import unittest

from collections_extra import Stack


class TestStack(unittest.TestCase):
    def setUp(self):
        self.stack = Stack([1, 2, 3])

    def test_push(self):
        self.stack.push(4)
        self.assertEqual(len(self.stack), 4)
        self.assertEqual(self.stack.peek(), 4)
        self.assertEqual(list(self.stack), [1, 2, 3, 4])

    def test_pop(self):
        self.assertEqual(self.stack.pop(), 3)
        self.assertEqual(self.stack.pop(), 2)
        self.assertEqual(len(self.stack), 1)
        self.assertEqual(self.stack.peek(), 1)

    def test_pop_from_empty_stack(self):
        stack = Stack()
        self.assertEqual(len(stack), 0)