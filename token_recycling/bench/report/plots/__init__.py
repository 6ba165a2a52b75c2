"""The plots of a report, with matplotlib."""
