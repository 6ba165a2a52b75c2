"""Functions for dates and times."""

from datetime import date, datetime, time, timedelta, timezone

WEEKDAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]


def utcnow():
    """Return the current time in UTC, with the timezone set."""
    return datetime.now(timezone.utc)


def start_of_day(value):
    """Return the first moment of the day of a datetime."""
    return datetime.combine(value.date(), time.min, tzinfo=value.tzinfo)


def start_of_week(value):
    """Return the Monday of the week of a date."""
    return value - timedelta(days=value.weekday())


def is_leap_year(year):
    """Return True if the year has a 29th of February."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def days_in_month(year, month):
    """Return the number of days in a month."""
    if month == 2:
        return 29 if is_leap_year(year) else 28
    if month in (4, 6, 9, 11):
        return 30
    return 31


def add_months(value, months):
    """Return the date a number of months later.

    If the day does not exist in that month, the last day of the month
    is used instead.
    """