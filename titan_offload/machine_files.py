"""Reads files of /proc and /sys, and says what it could not read.

Owns the formats that several of these files share: numbers by key, and lists of CPUs or NUMA nodes. Relies on a root
directory that tests can set; imports nothing but the standard library. No content of a file raises: what is missing or
malformed becomes an entry of `MachineFiles.problems`, which names the file, what is wrong and what is taken in its
place.
"""

import re
from pathlib import Path

PROCESS_STATUS = "/proc/self/status"

_NUMBER = re.compile(r"^(?:Node +[0-9]+ +)?([\w().]+):?[ \t]+([0-9]{1,20})( kB)?$", re.MULTILINE | re.ASCII)
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", re.ASCII)


class MachineFiles:
    """The files below ``root``, named by their paths on the machine, such as ``"/proc/meminfo"``.

    Args:
        root: directory that stands for ``/``.

    Attributes:
        problems: what could not be read so far.
    """

    def __init__(self, root: Path | str = "/") -> None:
        self.root = Path(root)
        self.problems: list[str] = []

    @property
    def is_real(self) -> bool:
        """Whether these are the machine's own files."""
        return self.root == Path("/")

    def path(self, file: str) -> Path:
        """Where ``file`` of the machine is to be found."""
        return self.root / file.lstrip("/")

    def note(self, file: str, what: str, instead: str) -> None:
        """Notes a problem: ``what`` is wrong with ``file``, and what is taken ``instead``. The same one only once."""
        problem = f"{file}: {what}; taken instead: {instead}"
        if problem not in self.problems:
            self.problems.append(problem)

    def read(self, file: str, instead: str = "") -> str | None:
        """The text of ``file`` without surrounding whitespace; None where it cannot be read.

        Args:
            file: its path on the machine.
            instead: what the caller takes without it, for the note. Without this argument the file may be missing, and
                only another failure is noted.
        """
        try:
            return self.path(file).read_text(errors="replace").strip()
        except (FileNotFoundError, NotADirectoryError) as error:
            if instead:
                self.note(file, error.strerror or "cannot be read", instead)
        except (OSError, ValueError) as error:  # ValueError: a name with a null character
            self.note(file, getattr(error, "strerror", None) or "cannot be read", instead or "nothing")
        return None

    def numbers(self, file: str, instead: str = "") -> dict[str, int]:
        """The lines ``key number``, ``key: number`` or ``key: number kB`` of ``file``, the latter in bytes.

        Lines of any other form are left out, and so a malformed figure is a missing one.
        """
        lines = _NUMBER.findall(self.read(file, instead) or "")
        return {key: int(number) * (1024 if unit else 1) for key, number, unit in lines}

    def number(self, file: str, instead: str) -> int | None:
        """The one number in ``file``; None where it is missing or malformed, which is noted."""
        text = self.read(file, instead)
        if text is None:
            return None
        if not re.fullmatch(r"-?[0-9]{1,20}", text):
            self.note(file, f"{text[:40]!r} is not a number", instead)
            return None
        return int(text)

    def cpu_list(self, file: str, instead: str, key: str = "") -> set[int] | None:
        """The list of CPUs or NUMA nodes in ``file``, or in its line ``key:``; None where missing or malformed."""
        text = self.read(file, instead)
        if text is not None and key:
            line = re.search(rf"^{key}:[ \t]*(.*)$", text, re.MULTILINE)
            text = line and line[1]
            if text is None:
                self.note(file, f"no {key}", instead)
        if text is None:
            return None
        try:
            return parse_cpu_list(text)
        except ValueError as error:
            self.note(file, str(error), instead)
            return None


def parse_cpu_list(text: str) -> set[int]:
    """The numbers in a list such as ``"0-3,8"``; ``""``: none.

    Raises:
        ValueError: ``text`` is no such list.
    """
    numbers: set[int] = set()
    for part in text.split(",") if text.strip() else ():
        ends = _RANGE.fullmatch(part.strip())
        if ends is None or int(ends[2] or ends[1]) < int(ends[1]):
            raise ValueError(f'{text[:40]!r} is not a list of numbers and ranges such as "0-3,8"')
        numbers.update(range(int(ends[1]), int(ends[2] or ends[1]) + 1))
    return numbers
