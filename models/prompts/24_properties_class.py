class Temperature:
    """A temperature that can be read and set in several units."""

    def __init__(self, kelvin=273.15):
        self.kelvin = kelvin

    def __repr__(self):
        return f"Temperature({self.kelvin!r})"

    @property
    def kelvin(self):
        """The temperature in kelvin."""
        return self._kelvin

    @kelvin.setter
    def kelvin(self, value):
        if value < 0:
            raise ValueError("temperature must not be below absolute zero")
        self._kelvin = float(value)

    @property
    def celsius(self):
        """The temperature in degrees Celsius."""
        return self.kelvin - 273.15

    @celsius.setter
    def celsius(self, value):
        self.kelvin = value + 273.15

    @property
    def fahrenheit(self):
        """The temperature in degrees Fahrenheit."""
        return self.celsius * 9 / 5 + 32

    @fahrenheit.setter
    def fahrenheit(self, value):