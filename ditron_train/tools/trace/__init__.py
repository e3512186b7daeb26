"""Tool: shows what overlaps. ``record``: of a run; ``schedule``: the order of tiles and chunks, without a GPU."""
