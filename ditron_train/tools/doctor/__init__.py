"""Tool: says what works on this machine, what does not, and the fix. Reads facts, changes nothing, needs no GPU."""
