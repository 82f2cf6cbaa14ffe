"""How near the engine comes to what one GPU can do, in a few minutes.

    python loadtest/gpu/bench.py [--only decode,host] [--seconds-per 15] [--json FILE]

The embedded pair is widened to 7 and 1 billion parameters. A section that fails says so, and the next one follows.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import device
import torch
from company import company
from decode import decode, host, prefill
from rig import Rig
from scale import SMALL, WHOLE, Scale

from paceline.bench.number_lists import parse_sizes
from paceline.errors import NotWritten
from paceline.whole_file import write_json
from speculation import draft, speculation


def ceilings(rig: Rig) -> dict[str, Any]:
    """What the others are compared with."""
    measured = rig.ceilings
    row = device.name(rig.device), f"{measured.bandwidth / 1e9:.1f}", f"{measured.matmul / 1e12:.3g}"
    rig.table("ceilings", ("device", "copy GB/s", "bf16 TFLOP/s"), [row])
    return {"device": row[0], "bandwidth": measured.bandwidth, "matmul": measured.matmul}


def peer(rig: Rig) -> dict[str, Any]:
    """Imported late: an older transformers has no continuous batching, and this section alone should fail then."""
    import peer as beside

    return beside.peer(rig)


SECTIONS: dict[str, Callable[[Rig], dict[str, Any]]] = {
    "ceilings": ceilings,
    "decode": decode,
    "host": host,
    "prefill": prefill,
    "draft": draft,
    "speculation": speculation,
    "company": company,
    "peer": peer,
}


def run(rig: Rig, names: list[str], json_out: Path | None) -> bool:
    """Run sections; whether none failed. The file has what is measured so far: a run may be cut off."""
    results: dict[str, Any] = {}
    is_written = True
    for name in names:
        began = time.perf_counter()
        rig.say(f"\n== {name}")
        try:
            results[name] = SECTIONS[name](rig)
        except Exception as error:
            rig.say(traceback.format_exc())
            rig.say(f"{name} FAILED: {type(error).__name__}: {error}")
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            rig.discard()
        rig.say(f"{name}: {time.perf_counter() - began:.1f} s")
        if json_out is not None:
            is_written = _is_written(rig, json_out, results)
    return is_written and not any("error" in result for result in results.values())


def _is_written(rig: Rig, path: Path, results: dict[str, Any]) -> bool:
    try:
        write_json(path, results)
    except NotWritten as error:
        rig.say(str(error))
        return False
    return True


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python loadtest/gpu/bench.py", description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma-separated (default all)")
    parser.add_argument("--seconds-per", type=float, help="of each part of a section, about (default 10; small: 0)")
    parser.add_argument("--depths", help="auto, 0 and other fixed depths (default auto,0,1,2,3,5,8; small: auto,0,2,4)")
    parser.add_argument("--concurrency", help="of speculation (default 1,8,64,256; small: 1,4)")
    parser.add_argument("--memory", type=float, help="share of the GPU's for the engine (default 0.6)")
    parser.add_argument("--pair", type=Path, help="directory of the widened checkpoints; made if there are none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--small", action="store_true", help="the embedded pair itself, for a look on any machine")
    return parser.parse_args()


def _scale(arguments: argparse.Namespace) -> Scale:
    """The scale that is asked for, as a whole and in what has an option of its own."""
    streams = arguments.concurrency
    asked: dict[str, Any] = {
        "seconds": arguments.seconds_per,
        "depths": arguments.depths,
        "concurrencies": None if streams is None else tuple(parse_sizes(streams)),
        "memory": arguments.memory,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    return replace(SMALL if arguments.small else WHOLE, **given)


def main() -> int:
    arguments = _arguments()
    names = [name.strip() for name in arguments.only.split(",")]
    unknown = sorted(set(names) - SECTIONS.keys())
    if unknown:
        raise SystemExit(f"error: --only {', '.join(unknown)}: must be among {', '.join(SECTIONS)}")
    if not (arguments.small or torch.cuda.is_available()):
        raise SystemExit("error: there is no GPU; --small runs on any machine")
    rig = Rig(_scale(arguments), arguments.pair)
    return 0 if run(rig, names, arguments.json) else 1


if __name__ == "__main__":
    raise SystemExit(main())
