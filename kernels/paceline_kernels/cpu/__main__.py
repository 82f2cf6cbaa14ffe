"""`python -m paceline_kernels.cpu` compiles everything ahead, so that no first use has to wait."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from paceline_kernels.cpu.build import LIBRARIES, BuildError, build, march


def main() -> None:
    """Compile as many libraries at once as there are cores; exit status 1 if one cannot be."""
    target = march()
    with ThreadPoolExecutor(min(len(LIBRARIES), os.cpu_count() or 1)) as pool:
        libraries = {name: pool.submit(build, name, target) for name in LIBRARIES}
        failed = False
        for name, library in libraries.items():
            try:
                print(f"{name}: {library.result()}", flush=True)
            except BuildError as error:
                failed = True
                print(f"{name}: {error}", file=sys.stderr)
    if failed:
        sys.exit("paceline: no native code here; torch computes instead, several times slower")


if __name__ == "__main__":
    main()
