"""Values that Triton's compiler loses: carried by a loop for the bounds of a loop inside it.

Its pass that removes what a loop carries for nobody does not ask for the bounds of loops inside (triton-lang/triton,
pull request 9036): where a value serves nothing else, its first value stands for all (seen in 3.6). A count of what
has been waited for stayed 0, and everything was waited for again.
"""

from __future__ import annotations

import re

_CARRIED = re.compile(r"iter_args\(([^)]*)\)")
_LOOP = re.compile(r"\bscf\.for %[\w#]+ = (%[\w#]+) to (%[\w#]+) step (%[\w#]+)")
_RESULT = re.compile(r"^\s*(%\w+)(?::\d+)? = (.*)")


def carried_bounds(ttir: str) -> list[str]:
    """Of Triton's own intermediate text of a kernel: values that a ``for`` carries and that bounds of one are made of,
    whatever else they serve."""
    carried: set[str] = set()
    bounds: list[str] = []
    operands: dict[str, list[str]] = {}
    for line in ttir.splitlines():
        line = line.split(" loc(")[0]
        found = _CARRIED.search(line)
        if found:
            carried.update(pair.split("=")[0].strip() for pair in found[1].split(","))
        loop, result = _LOOP.search(line), _RESULT.match(line)
        if loop:
            bounds += loop.groups()
        elif result:
            operands[result[1]] = re.findall(r"%\w+", result[2])
    reached: set[str] = set()
    while bounds:
        name = bounds.pop().split("#")[0]
        if name not in reached:
            reached.add(name)
            bounds += operands.get(name, [])
    return sorted(reached & carried)
