"""Tool: reads what every rank called last, and names the first one that went another way."""
