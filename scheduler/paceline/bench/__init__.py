"""Benchmarks of the engine against itself: ratios from one run, on one machine.

Settings that are compared share one engine, with its weights, its KV and the prompts in it, and take turns, some of
them by steps. So they cannot be arguments of constructors: parts of a live engine are replaced while a setting has its
turn, and put back behind it. These are all places where that is done:

    scheduler.speculation               setting.steered, for a turn
    scheduler.batch                     turns.Track.taken, for a turn
    policy of a setting's control       turns.Lane, timed, for a step
    engine.plan, .finish                turns.stopwatch, timed, while a batch is served
    engine.runner                       acceptance.recording, which tallies, for a trial
    drafters of the host's runner       trim.trimming, for a turn
    verifier of the host's runner       synthetic.decree, for good
"""

from paceline.bench.cli import app

__all__ = ["app"]
