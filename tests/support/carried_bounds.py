"""Values that Triton's compiler loses: carried by a loop for the bounds of a loop inside it.

Its pass that removes what a loop carries for nobody does not ask for the bounds of loops inside (triton-lang/triton,
pull request 9036): if a value serves nothing else, its first value stands for all (seen in 3.6). A count of what
has been waited for stayed 0, and everything was waited for again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LOOP = re.compile(r"scf\.for (%\w+) = (%[\w#]+) to (%[\w#]+) step (%[\w#]+)(?: iter_args\(([^)]*)\))?")
_PAIRS = re.compile(r"(%\w+) = (%[\w#]+)")
_RESULT = re.compile(r"(%\w+)(?::\d+)? = (.*)")
_NAME = re.compile(r"%\w+")
_RETURNS = ("scf.yield", "scf.condition")


@dataclass
class _Scope:
    """Between two braces: what its names stand for, whose values its yields are, what a ``for`` carries there."""

    owner: int | None = None
    names: dict[str, int] = field(default_factory=dict)
    carried: dict[int, str] = field(default_factory=dict)


class _Values:
    """The values of a kernel's text, each by a number, since names come again in other loops."""

    def __init__(self) -> None:
        self.scopes = [_Scope()]
        self.sources: list[list[int]] = []
        self.bounds: list[tuple[list[int], dict[int, str]]] = []  # of each loop, and what those around it carry

    def new(self, name: str, sources: list[int]) -> int:
        number = len(self.sources)
        self.sources.append(sources)
        self.scopes[-1].names[name] = number
        return number

    def of(self, text: str) -> list[int]:
        """The values that are named there."""
        found = (next((s.names[name] for s in reversed(self.scopes) if name in s.names), None)
                 for name in _NAME.findall(text))  # fmt: skip
        return [number for number in found if number is not None]

    def read(self, line: str) -> None:
        """A line of Triton's text."""
        if line.startswith("}"):
            closed = self.scopes.pop()
            if line.endswith("{"):  # else, do
                self.scopes.append(_Scope(closed.owner))
            return
        result = _RESULT.match(line)
        loop, operands = _LOOP.search(line), self.of(result[2] if result else line)
        owner = self.new(result[1], operands) if result else None
        if loop:
            self._enter(loop, owner)
        elif line.startswith("^"):  # a block's arguments
            for name in _NAME.findall(line):
                self.new(name, [self.scopes[-1].owner] if self.scopes[-1].owner is not None else [])
        elif line.startswith(_RETURNS) and self.scopes[-1].owner is not None:
            self.sources[self.scopes[-1].owner] += operands
        elif line.endswith("{"):
            pairs = _PAIRS.findall(line) if "scf.while" in line else []
            inits = [(name, self.of(init)) for name, init in pairs]
            self.scopes.append(_Scope(owner))
            for name, sources in inits:
                self.new(name, sources)

    def _enter(self, loop: re.Match[str], owner: int | None) -> None:
        around = {number: name for scope in self.scopes for number, name in scope.carried.items()}
        self.bounds.append((self.of(" ".join(loop.groups()[1:4])), around))
        inits = [(name, self.of(init)) for name, init in _PAIRS.findall(loop[5] or "")]
        self.scopes.append(_Scope(owner))
        self.new(loop[1], [])
        for name, sources in inits:
            self.scopes[-1].carried[self.new(name, sources)] = name

    def reached(self, numbers: list[int]) -> set[int]:
        """All that these are made of."""
        found: set[int] = set()
        left = list(numbers)
        while left:
            number = left.pop()
            if number not in found:
                found.add(number)
                left += self.sources[number]
        return found


def carried_bounds(ttir: str) -> list[str]:
    """Of Triton's own intermediate text of a kernel: values that a ``for`` carries and that bounds of a ``for`` inside
    it are made of, whatever else they serve."""
    values = _Values()
    for line in ttir.splitlines():
        line = line.split(" loc(")[0].strip()
        if line and not line.startswith("#"):
            values.read(line)
    lost = (around[number] for bounds, around in values.bounds for number in values.reached(bounds) & around.keys())
    return sorted(set(lost))
