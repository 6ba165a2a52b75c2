import math

import pytest

from geometry import Circle, Point, Rectangle


@pytest.fixture
def origin():
    return Point(0, 0)


@pytest.mark.parametrize(
    "x, y, expected",
    [
        (0, 0, 0),
        (3, 4, 5),
        (-3, -4, 5),
        (1, 1, math.sqrt(2)),
    ],
)
def test_distance(origin, x, y, expected):
    assert origin.distance(Point(x, y)) == pytest.approx(expected)


@pytest.mark.parametrize("width, height", [(1, 1), (2, 3), (10, 0.5)])
def test_rectangle_area(width, height):
    rectangle = Rectangle(width, height)
    assert rectangle.area() == width * height
    assert rectangle.perimeter() == 2 * (width + height)


@pytest.mark.parametrize("width, height", [(-1, 1), (1, -1), (0, 1)])
def test_rectangle_with_invalid_size(width, height):
    with pytest.raises(ValueError, match="must be positive"):
        Rectangle(width, height)


@pytest.mark.parametrize("radius", [1, 2, 0.5])
def test_circle_area(radius):