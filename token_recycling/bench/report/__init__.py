"""Reports on rows: tables, plots, one page."""
