"""Tool: measures which tile sizes and transfers are quickest on this machine, and writes the table that ops choose
by."""
