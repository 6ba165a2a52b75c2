class Matrix:
    """A dense matrix of numbers with the usual operators."""

    def __init__(self, rows):
        self.rows = [list(row) for row in rows]
        if len({len(row) for row in self.rows}) > 1:
            raise ValueError("all rows must have the same length")

    @classmethod
    def identity(cls, n):
        return cls([[1 if i == j else 0 for j in range(n)] for i in range(n)])

    @property
    def shape(self):
        return len(self.rows), len(self.rows[0])

    def __getitem__(self, index):
        i, j = index
        return self.rows[i][j]

    def __eq__(self, other):
        if not isinstance(other, Matrix):
            return NotImplemented
        return self.rows == other.rows

    def __add__(self, other):
        if not isinstance(other, Matrix):
            return NotImplemented
        if self.shape != other.shape:
            raise ValueError("shapes do not match")
        return Matrix([[a + b for a, b in zip(x, y)] for x, y in zip(self.rows, other.rows)])

    def __sub__(self, other):