"""The texts of a batch, on the terminal of whoever asked for them."""

from __future__ import annotations


class Screen:
    """Prints the texts of a batch one after the other: the first that has not ended as it comes, those behind it after.

    Several prompts get a heading each.
    """

    def __init__(self, prompts: list[str]) -> None:
        self._headings = [f"==> {prompt}\n" if len(prompts) > 1 else "" for prompt in prompts]
        self._waiting: list[list[str]] = [[heading] for heading in self._headings]
        self._ended = [False] * len(prompts)
        self._turn = 0

    def add(self, index: int, text: str) -> None:
        self._waiting[index].append(text)
        self._print()

    def finish(self, index: int) -> None:
        self._waiting[index].append("\n\n" if self._headings[index] else "\n")
        self._ended[index] = True
        self._print()

    def _print(self) -> None:
        while self._turn < len(self._waiting):
            print("".join(self._waiting[self._turn]), end="", flush=True)
            self._waiting[self._turn].clear()
            if not self._ended[self._turn]:
                return
            self._turn += 1
