from enum import Enum, Flag, auto


class Direction(Enum):
    """The four directions on a grid."""

    NORTH = (0, -1)
    EAST = (1, 0)
    SOUTH = (0, 1)
    WEST = (-1, 0)

    @property
    def dx(self):
        return self.value[0]

    @property
    def dy(self):
        return self.value[1]

    def turn_right(self):
        members = list(Direction)
        return members[(members.index(self) + 1) % len(members)]

    def turn_left(self):
        members = list(Direction)
        return members[(members.index(self) - 1) % len(members)]

    def opposite(self):
        return self.turn_right().turn_right()


class Color(Enum):
    """Colors with their red, green and blue parts."""

    RED = (255, 0, 0)
    GREEN = (0, 255, 0)
    BLUE = (0, 0, 255)
    WHITE = (255, 255, 255)
    BLACK = (0, 0, 0)

    @property
    def red(self):
        return self.value[0]

    @property
    def green(self):