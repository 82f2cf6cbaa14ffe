"""The texts of a batch, on the terminal of whoever asked for them."""

from __future__ import annotations


class Screen:
    """Prints the texts of a batch one after the other: the first that has not ended as it comes, those behind it after.

    Several texts get a heading each.

    Args:
        n: texts of each prompt. Not checked: whoever is asked for them does that.
    """

    def __init__(self, prompts: list[str], n: int = 1) -> None:
        self._prompts, self._n = prompts, n
        self._count = len(prompts) * n
        self._waiting: dict[int, list[str]] = {}
        self._ended: set[int] = set()
        self._turn = 0

    def add(self, index: int, text: str) -> None:
        self._of(index).append(text)
        self._print()

    def finish(self, index: int) -> None:
        self._of(index).append("\n\n" if self._count > 1 else "\n")
        self._ended.add(index)
        self._print()

    def _of(self, index: int) -> list[str]:
        """What is not printed yet of a text."""
        if index not in self._waiting:
            self._waiting[index] = [f"==> {self._prompts[index // self._n]}\n" if self._count > 1 else ""]
        return self._waiting[index]

    def _print(self) -> None:
        while self._turn < self._count:
            print("".join(self._of(self._turn)), end="", flush=True)
            self._of(self._turn).clear()
            if self._turn not in self._ended:
                return
            self._turn += 1
