"""Tools: import anything, are imported by nothing above."""
