"""Tool: shows what overlaps. ``schedule``: the order in which tiles run and chunks arrive, without a GPU."""
